"""`python -m benchmarks.speed.formula [--runs N] [--save]`: `memir formula` over all symbols, cold, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.speed.machine import options, page

PAGE = Path(__file__).with_name("formula.md")
AIM = 15.0  # seconds
HELD = ("llama-3.1-8b", "qwen3-8b")  # against the aim: a preset with all symbols
BESIDE = ("llama-3.1-8b --parallel fsdp{degree=N}", "llama-3.1-8b --freeze c")


def seconds(arguments: str) -> float:
    """Wall seconds of one run without the cache. CalledProcessError where it fails."""
    command = [sys.executable, "-m", "memir", "formula", *arguments.split()]
    start = time.perf_counter()
    subprocess.run(command, env={**os.environ, "MEMIR_NO_CACHE": "1"}, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> int:
    asked = options("formula", __doc__, PAGE, 3)
    rows = ["| memir formula | seconds | aim | met |", "|---|---|---|---|"]
    met = True
    for case in (*HELD, *BESIDE):
        found = median(seconds(case) for _ in range(asked.runs))
        judged = f"<= {AIM:g} s | {'yes' if found <= AIM else 'no'}" if case in HELD else " | "
        met = met and (found <= AIM or case in BESIDE)
        rows.append(f"| `{case}` | {found:.1f} | {judged} |")
    command = f"python -m benchmarks.speed.formula --runs {asked.runs} --save"
    intro = f"`{command}`: wall seconds of the whole command in a fresh process, without the cache, medians."
    text = page("Speed of memir formula, cold", intro, rows)
    print(text)
    if asked.save:
        PAGE.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
