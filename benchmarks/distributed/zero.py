"""DeepSpeed's ZeRO run for real on two CPU ranks beside the `zero` pass: zero.csv, and zero.md from it.

The measured peak is without what one matrix product allocates and frees by itself: the CPU's bf16 kernels pack their operands,
a GPU's do not, and memir does not count it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.distributed.zero_cases import BATCH, CASES, SEQ, Case
from memir.analysis.liveness import timeline
from memir.api import trace
from memir.ir.core import Program
from memir.pipeline import Pipeline
from memir.runtime.measure import Measured

HERE = Path(__file__).parent
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one rank at the step's start and peak, measured."""

    case: str
    rank: int
    start: int
    peak: int  # without the workspaces of matrix products
    raw_peak: int  # as the allocator counts
    end: int


def without_products(measured: Measured) -> int:
    """The peak without blocks that one call of a matrix product allocates and frees."""
    made = {event.block: number for number, event in enumerate(measured.timeline) if event.delta > 0}
    own: set[int] = set()
    for number, event in enumerate(measured.timeline):
        begun = made.get(event.block) if event.delta < 0 else None
        if begun is None or event.op not in _PRODUCTS or not event.calls:
            continue
        if measured.timeline[begun].calls[-1:] == event.calls[-1:]:
            own |= {begun, number}
    now = peak = measured.at_start
    for number, event in enumerate(measured.timeline):
        now += 0 if number in own else event.delta
        peak = max(peak, now)
    return peak


def rows_of(case: Case, ranks: Iterable[Measured]) -> list[Row]:
    """The case's rows of the table."""
    return [Row(case.name, n, m.at_start, without_products(m), m.peak, m.at_end) for n, m in enumerate(ranks)]


def predicted(case: Case, rank: int, step: Program) -> tuple[int, int]:
    """(start, peak) of the pass, in bytes, the host's with them: on the CPU it is the same memory."""
    program = Pipeline.parse(f"{case.method[:-1]} rank={rank}}}").run(step)
    dims = {"B": BATCH, "S": SEQ}
    everything = timeline(_on_gpu(program)).evaluate(dims)
    return everything.start, everything.peak


def _on_gpu(program: Program) -> Program:
    from dataclasses import replace

    return replace(program, storages=tuple(replace(s, device="gpu") for s in program.storages))


def traced(case: Case) -> Program:
    """The step that the pass is given."""
    return trace(case.target, case.recipe, sets=dict(case.sets), batch=BATCH, seq=SEQ).program


def read() -> list[Row]:
    """The committed table."""
    with (HERE / "zero.csv").open() as file:
        return [Row(r["case"], *(int(r[f.name]) for f in fields(Row)[1:])) for r in csv.DictReader(file)]


def write(rows: Iterable[Row]) -> None:
    """Commits the measurements."""
    with (HERE / "zero.csv").open("w") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([f.name for f in fields(Row)])
        out.writerows([getattr(row, f.name) for f in fields(Row)] for row in rows)


def measured(progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Runs DeepSpeed on every case; needs `pip install deepspeed`. Half a minute a case and more."""
    from memir.runtime.ranks import real_ranks

    found: list[Row] = []
    for case in CASES:
        found += rows_of(case, real_ranks(case.target, case.recipe, BATCH, SEQ, dict(case.sets), case.method))
        progress(case.name)
    return found


def table(rows: Iterable[Row]) -> str:
    """The page zero.md."""
    by_name = {case.name: case for case in CASES}
    steps: dict[str, Program] = {}
    lines, errors, starts = [], [], []
    for row in rows:
        case = by_name[row.case]
        key = f"{case.target} {case.sets} {case.recipe}"
        if key not in steps:
            steps[key] = traced(case)
        start, peak = predicted(case, row.rank, steps[key])
        error = 100 * (peak - row.peak) / row.peak
        errors.append(abs(error))
        starts.append(abs(start - row.start))
        off = f"{start - row.start:+,} | {row.peak:,} | {peak - row.peak:+,} | {error:+.4f} %"
        lines.append(f"| {row.case} | {row.rank} | {row.start:,} | {off} |")
    options = [f"| {case.name} | `{case.method}` |" for case in CASES if any(row.case == case.name for row in rows)]
    found = f"resident bytes off by {min(starts)} to {max(starts)}, peaks by {max(errors):.4f} % at most"
    return "\n".join(
        [
            "# DeepSpeed's ZeRO on two CPU ranks",
            "",
            "`python -m benchmarks.distributed zero` runs DeepSpeed 0.19.8 (gloo's messages, NCCL's use of the allocator,",
            "docs/distributed.md) and writes zero.csv; `--table` compares the pass with it. Bytes of the third step, B=2,",
            "S=64, bf16 with AdamW; measured peaks are without the bf16 matrix products' own workspaces on the CPU.",
            "Host memory counts too, it is the same here.",
            "",
            f"{len(errors)} rows: {found}.",
            "What is missing are scalars: DeepSpeed's overflow tracker, the loss scale and the norm that it keeps, and numbers",
            "that operators make tensors of.",
            "",
            "| case | rank | at start | off | peak | off | |",
            "|---|---|---|---|---|---|---|",
            *lines,
            "",
            "| case | method |",
            "|---|---|",
            *options,
            "",
        ]
    )
