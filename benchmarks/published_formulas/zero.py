"""ZeRO's formulas of model states beside the `zero` pass: `python -m benchmarks.published_formulas.zero` writes zero.md.

Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1, with mixed-precision Adam (K = 12): P parameters on N ranks take
4P + 12P/N bytes with optimizer states partitioned, 2P + 14P/N with gradients too, 16P/N with parameters too. A partition ends
at a number, so N is one here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memir.api import trace
from memir.ir.core import Kind, Program
from memir.pipeline import Pipeline
from memir.recipe import Recipe

HERE = Path(__file__).resolve().parent
SETS = {"n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 512}
DEGREES = (2, 4, 8, 16, 64)
STEP = 4  # bytes: the optimizer's count of steps
_STATES = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
_OPTIONS = "reduce-bucket-size=1000 param-persistence-threshold=0 max-reuse-distance=0 prefetch-bucket-size=0"


@dataclass(frozen=True, slots=True)
class Row:
    """One stage on N ranks: bytes of rank 0's model states, the formula's, and what the difference is made of."""

    stage: int
    degree: int
    derived: int
    published: int
    padding: int  # of the flat partition, or of each parameter's part
    overhang: int  # gradients: stage 1, the buffer they move to; stage 2, what of it is other ranks'

    @property
    def is_accounted_for(self) -> bool:
        """Whether nothing is left of the difference."""
        return self.derived - self.published == self.padding + self.overhang + STEP


def published(stage: int, numel: int, degree: int) -> int:
    """The formula, in bytes."""
    return {1: 4 * numel + 12 * numel // degree, 2: 2 * numel + 14 * numel // degree, 3: 16 * numel // degree}[stage]


def states(program: Program, *, last: bool) -> int:
    """Bytes of parameters, gradients and optimizer states: the most in a backward, or after the last one (`last`)."""
    size = {s.name: s.nbytes.evaluate({"B": 2, "S": 64}) for s in program.storages if s.kind in _STATES}
    alive = {s.name for s in program.storages if s.live_in and s.name in size}
    most = now = sum(size[name] for name in alive)
    for phase, op in program.ops():
        if phase.name == "optimizer":
            break
        made = {v.storage for v in op.results if v.storage in size} - alive
        alive |= made
        now += sum(size[name] for name in made)
        most = max(most, now)
        gone = alive & set(op.frees)
        alive -= gone
        now -= sum(size[name] for name in gone)
    return now if last else most


def rows() -> Iterable[Row]:
    """All stages and degrees on examples/gpt.py, one trace."""
    step = trace("examples/gpt.py", Recipe(target="cpu", dtype="bf16"), sets=SETS, batch=2, seq=64).program
    sizes = [s.nbytes.constant // 2 for s in step.storages if s.kind == Kind.PARAMETER]
    numel = sum(sizes)
    for stage in (1, 2, 3):
        for degree in DEGREES:
            program = Pipeline.parse(f"zero{{stage={stage} degree={degree} {_OPTIONS}}}").run(step)
            derived = states(program, last=stage > 1)
            padded = -(-numel // (2 * degree)) * 2 * degree
            whole, part, start = 0, padded // degree, 0
            for size in sizes:  # the gradients that rank 0 keeps, whole
                whole, start = whole + (size if start < part else 0), start + size
            cut = sum(-(-size // degree) for size in sizes)
            spare = {
                1: 2 * (padded - numel) + 12 * part - 12 * numel // degree,
                2: 2 * (padded - numel) + 14 * part - 14 * numel // degree,
                3: 16 * cut - 16 * numel // degree,
            }[stage]
            kept = {1: 2 * whole, 2: 2 * (whole - part), 3: 0}[stage]
            yield Row(stage, degree, derived, published(stage, numel, degree), spare, kept)


def page(found: Iterable[Row]) -> str:
    """zero.md."""
    formula = {1: "4P + 12P/N", 2: "2P + 14P/N", 3: "16P/N"}
    lines = [
        "# ZeRO's model states, derived by the pass",
        "",
        "`python -m benchmarks.published_formulas.zero` wrote this page: examples/gpt.py with 3 layers of width 128 in",
        "bf16 with AdamW under the `zero` pass, rank 0; parameters, gradients and optimizer states, in stage 1 at their most",
        "in backward, in stages 2 and 3 after it. The formulas are those of figure 1 of Rajbhandari et al. 2020 (arXiv",
        "1910.02054). What differs is padding, the count of steps (4 bytes), and DeepSpeed's buffer for the rank's gradients,",
        "which holds those of a parameter whole where it reaches into the next partition: in stage 1 it is there while all",
        "gradients still are.",
        "",
        "| stage | formula | N | formula's bytes | the pass's | padding | buffer | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        ends = f"{r.padding:,} | {r.overhang:,} | {'' if r.is_accounted_for else '**not accounted for**'} |"
        lines.append(f"| {r.stage} | {formula[r.stage]} | {r.degree} | {r.published:,} | {r.derived:,} | {ends}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code 1 where a difference is not accounted for."""
    found = list(rows())
    text = page(found)
    print(text, end="")
    (HERE / "zero.md").write_text(text)
    return 0 if all(r.is_accounted_for for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
