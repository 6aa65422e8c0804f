"""Models in full size: the passes against a trace of one rank through PyTorch's own FSDP2 and DTensor code, on fake tensors.

Nothing is run for real here, and no memory is taken: the trace executes `fully_shard` and `parallelize_module` on a fake
process group of any size (memir/frontend/exact.py; equal to real ranks within 64 bytes, tests/oracle/test_exact_ranks.py). The
passes rewrite a step that was traced without them, over symbols.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import memir
from memir.analysis.liveness import timeline
from memir.frontend.exact import trace_rank
from memir.frontend.load import load_target
from memir.frontend.parallel import parse_methods
from memir.pipeline import Pipeline
from memir.recipe import Recipe

HERE = Path(__file__).resolve().parent
_MIXED = "param-dtype=bf16 reduce-dtype=f32"
_TENSOR = "tensor-parallel{degree=8 sequence loss}"


@dataclass(frozen=True, slots=True)
class Case:
    """A preset, the method and the passes that say the same, on `ranks` GPUs."""

    preset: str
    ranks: int
    method: str
    passes: str
    checkpoint: str
    batch: int = 1
    seq: int = 4096


CASES = (
    Case("llama-3.1-8b", 8, f"fsdp{{degree=8 {_MIXED}}}", f"fsdp{{degree=8 {_MIXED} shard-dtype=f32}}", "none"),
    Case("llama-3.1-8b", 8, f"fsdp{{degree=8 {_MIXED}}}", f"fsdp{{degree=8 {_MIXED} shard-dtype=f32}}", "full"),
    Case("llama-3.1-8b", 8, _TENSOR, _TENSOR, "none"),
    Case("llama-3.1-70b", 64, f"fsdp{{degree=64 {_MIXED}}}", f"fsdp{{degree=64 {_MIXED} shard-dtype=f32}}", "full"),
    Case(
        "llama-3.1-70b",
        512,
        f"fsdp{{degree=64 {_MIXED}}},{_TENSOR}",
        f"tensor-parallel{{degree=8 sequence loss placed-gradients}},fsdp{{degree=64 {_MIXED} shard-dtype=f32}}",
        "full",
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of rank 0 by the passes and by PyTorch's own code, and the seconds that each took."""

    preset: str
    ranks: int
    method: str
    checkpoint: str
    batch: int
    seq: int
    start: int
    start_traced: int
    peak: int
    peak_traced: int
    seconds: float  # of tracing the step and running the passes
    seconds_traced: float
    operators_traced: int

    @property
    def error(self) -> float:
        """Of the peak, in percent."""
        return 100 * (self.peak - self.peak_traced) / self.peak_traced


def measured(only: str = "") -> Iterator[Row]:
    """The cases with `only` in preset or method, one after another."""
    for case in CASES:
        if only in f"{case.preset} {case.ranks} {case.method} {case.checkpoint}":
            yield row(case)


def row(case: Case) -> Row:
    """Both sides of a case. The real model has its parameters in fp32 where FSDP casts them to bf16."""
    mixed = _MIXED in case.method
    checkpoint = case.checkpoint
    begun = time.perf_counter()
    traced = memir.trace(case.preset, Recipe(dtype="bf16", checkpoint=checkpoint), batch=case.batch, seq=case.seq)
    program = Pipeline.parse(case.passes).run(traced.program)
    numbers = timeline(program).evaluate(
        {n: v for n, v in {**traced.dims, "B": case.batch, "S": case.seq}.items() if n in program.dims}
    )
    middle = time.perf_counter()
    recipe = Recipe(dtype="f32" if mixed else "bf16", checkpoint=checkpoint)
    own = trace_rank(lambda: load_target(case.preset, recipe=recipe), recipe, parse_methods(case.method), case.batch, case.seq)
    real = timeline(own.program).evaluate({})
    return Row(
        case.preset,
        case.ranks,
        case.method,
        checkpoint,
        case.batch,
        case.seq,
        numbers.start,
        real.start,
        numbers.peak,
        real.peak,
        round(middle - begun, 1),
        round(time.perf_counter() - middle, 1),
        sum(1 for _ in own.program.ops()),
    )


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as comma-separated values."""
    names = [f.name for f in fields(Row)]
    lines = [names, *([str(getattr(r, name)) for name in names] for r in rows)]
    return "".join(",".join(f'"{cell}"' if "," in cell else cell for cell in line) + "\n" for line in lines)


def read() -> list[Row]:
    """The committed rows; none where there is no file."""
    if not (HERE / "full.csv").exists():
        return []
    kinds = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in fields(Row)}
    with (HERE / "full.csv").open(newline="", encoding="utf-8") as file:
        return [Row(**{name: kinds[name](text) for name, text in line.items()}) for line in csv.DictReader(file)]


def renewed(before: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The table with these rows in the place of those of the same cases, in the order of the cases."""

    def key(of: Row | Case) -> tuple[str, int, str, str]:
        return of.preset, of.ranks, of.method, of.checkpoint

    table = {key(r): r for r in (*before, *rows)}
    return [table[key(case)] for case in CASES if key(case) in table]


def page(rows: Sequence[Row]) -> str:
    """full.md."""
    head = __doc__ or ""
    lines = [
        "# Models in full size, pass beside PyTorch's own code",
        "",
        *head.partition("\n\n")[2].strip().splitlines(),
        "",
        "Bytes of rank 0, target cuda, AdamW. Seconds are of one core of a shared machine and say the order only.",
        "",
        "| model | ranks | method | checkpoint | B, S | at start | error | peak | error | % | seconds | PyTorch's | ops |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r.preset} | {r.ranks} | `{r.method}` | {r.checkpoint} | {r.batch}, {r.seq} | {r.start_traced:,} |"
            f" {r.start - r.start_traced:+,} | {r.peak_traced:,} | {r.peak - r.peak_traced:+,} | {r.error:+.4f} |"
            f" {r.seconds} | {r.seconds_traced} | {r.operators_traced:,} |"
            for r in rows
        ),
    ]
    return "\n".join(lines) + "\n"
