"""`python -m benchmarks.speed.cuts [--runs N] [--save]`: all cuts of models of 80 layers, after the trace."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.speed.machine import options, page
from memir.analysis.cost import Machine
from memir.api import TracedProgram, program_of
from memir.cuts import plan
from memir.recipe import Lora, Recipe

PAGE = Path(__file__).with_name("cuts.md")
AIM = 2.0  # seconds
CASES = (
    ("llama-3-70b", Recipe()),
    ("llama-3-70b, checkpointed", Recipe(checkpoint="full")),
    ("llama-3-70b, LoRA", Recipe(lora=Lora())),
    ("qwen2.5-72b", Recipe()),
)
H100 = Machine("h100", (("bf16", 989e12), ("f32", 67e12)), 3.35e12)  # so that steps are timed too


def measured(step: TracedProgram, runs: int) -> tuple[int, float, float]:
    """How many cuts, and the medians of wall and of processor seconds."""
    walls, spent = [], []
    number = 0
    for _ in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        number = len(plan(step.program, step.env, H100).cuts)
        walls.append(time.perf_counter() - wall)
        spent.append(time.process_time() - cpu)
    return number, median(walls), median(spent)


def main() -> int:
    asked = options("cuts", __doc__, PAGE, 5)
    rows = ["| model | cuts | seconds | seconds of processors | aim | met |", "|---|---|---|---|---|---|"]
    met = True
    for name, recipe in CASES:
        step = program_of(name.partition(",")[0], recipe, batch=8, seq=2048, cache=False)
        number, wall, spent = measured(step, asked.runs)
        met = met and spent <= AIM
        rows.append(f"| {name} | {number} | {wall:.2f} | {spent:.2f} | <= {AIM:g} s | {'yes' if spent <= AIM else 'no'} |")
    intro = (
        f"`python -m benchmarks.speed.cuts --runs {asked.runs} --save`: `memir.cuts.plan` on a traced step, medians; the aim "
        "is held against the seconds of processors, which other work on the machine lengthens less than wall seconds."
    )
    text = page("Speed of all cuts", intro, rows)
    print(text)
    if asked.save:
        PAGE.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
