"""The table: real bytes of every rank against the passes' and against the trace of PyTorch's own code."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import memir
from benchmarks.distributed.cases import Case
from memir.analysis.liveness import timeline
from memir.errors import MemirError
from memir.frontend.exact import trace_rank
from memir.frontend.load import load_target
from memir.frontend.parallel import parse_methods
from memir.ir.core import Program
from memir.options import parse_list
from memir.registry import PASSES
from memir.registry import passes as registry
from memir.runtime.measure import Measured
from memir.runtime.ranks import real_ranks

RESULTS = Path(__file__).with_name("results.csv")
COLUMNS = (
    "case",
    "rank",
    "start",
    "peak",
    "end",
    "start_error",
    "peak_error",
    "end_error",
    "trace_error",
    "peak_at",
    "verdict",
)
SCALARS = 256  # bytes: numbers that operators make tensors of; a difference below is no verdict's
Row = dict[str, str]


def rows(case: Case) -> list[Row]:
    """A line for each rank; real figures in bytes, errors are predicted minus measured."""
    target, sets = case.model
    real = real_ranks(target, case.recipe, case.batch, case.seq, sets, case.method)
    told = predictions(case, len(real))
    traced = trace_error(case, real[0])
    return [
        {
            "case": case.name,
            "rank": str(rank),
            "start": str(m.at_start),
            "peak": str(m.peak),
            "end": str(m.at_end),
            "trace_error": traced if rank == 0 else "",
            "peak_at": event.op if (event := m.peak_event()) else "",
            **judged(m, predicted),
        }
        for rank, (m, predicted) in enumerate(zip(real, told, strict=True))
    ]


def predictions(case: Case, ranks: int) -> list[tuple[int, int, int] | str]:
    """Start, peak and end of each rank by the passes, or why there are none."""
    words = case.pipeline.replace("}", "").split(",")
    missing = [name for word in words if (name := word.partition("{")[0].strip()) not in PASSES]
    if missing:
        return [f"no pass {', '.join(missing)} yet"] * ranks
    target, sets = case.model
    program = memir.trace(target, case.traced_recipe, batch=case.batch, seq=case.seq, sets=sets).program
    found: list[tuple[int, int, int] | str] = []
    for rank in range(ranks):
        try:
            found.append(figures(_rewritten(program, case.pipeline, rank), case))
        except MemirError as error:
            found.append(f"exit {error.exit_code}: {error.message}")
    return found


def _rewritten(program: Program, text: str, rank: int) -> Program:
    """The passes one after another; those that tell ranks apart are asked for this one, tensor-parallel ranks innermost."""
    passes: tuple[Any, ...] = parse_list(text, registry.load)
    inner = math.prod(int(str(p.degree)) for p in passes if p.name == "tensor-parallel")
    for made in passes:
        if hasattr(made, "rank"):
            made = dataclasses.replace(made, rank=rank // inner % int(str(made.degree)))
        program = made.run(program)
    return program


def figures(program: Program, case: Case) -> tuple[int, int, int]:
    """Bytes at start, peak and end, the host's included: it is the same memory here. S is that of a whole context group."""
    program = dataclasses.replace(program, storages=tuple(dataclasses.replace(s, device="gpu") for s in program.storages))
    degree = next((int(str(d)) for axis, d in program.mesh if axis.startswith("context")), 1)
    numbers = timeline(program).evaluate({"B": case.batch, "S": case.seq * degree})
    return numbers.start, numbers.peak, numbers.after[-1]


def trace_error(case: Case, real: Measured) -> str:
    """The peak of the trace of PyTorch's own code, minus the measured one; empty for methods that cannot be traced."""
    target, sets = case.model
    methods = parse_methods(case.method)
    if any(method.name not in ("fsdp", "tensor-parallel") for method in methods):
        return ""
    traced = trace_rank(lambda: load_target(target, recipe=case.recipe, sets=sets), case.recipe, methods, case.batch, case.seq)
    return str(timeline(traced.program).evaluate({}).peak - real.peak)


def judged(real: Measured, predicted: tuple[int, int, int] | str) -> Row:
    """The errors and what they amount to."""
    if isinstance(predicted, str):
        return {"start_error": "", "peak_error": "", "end_error": "", "verdict": predicted}
    errors = [p - m for p, m in zip(predicted, (real.at_start, real.peak, real.at_end), strict=True)]
    share = 100 * abs(errors[1]) / real.peak
    if errors[0] or errors[2]:
        verdict = f"resident bytes differ; peak {share:.4f} %"
    else:
        verdict = "exact" if abs(errors[1]) <= SCALARS else f"peak {share:.4f} %"
    return dict(zip(("start_error", "peak_error", "end_error"), map(str, errors), strict=True)) | {"verdict": verdict}


def read() -> dict[str, list[Row]]:
    """The committed lines by case."""
    found: dict[str, list[Row]] = {}
    if RESULTS.exists():
        with RESULTS.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                found.setdefault(line["case"], []).append(line)
    return found


def write(known: Iterable[Case], table: dict[str, list[Row]]) -> None:
    """results.csv in the order of the cases; lines of cases that are gone go."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for case in known:
            writer.writerows(table.get(case.name, []))


def renewed(known: tuple[Case, ...], only: str, missing: bool) -> Iterator[list[Row]]:
    """Runs the cases with `only` in their name (with `missing`, those without a prediction) and writes after each."""
    table = read()
    for case in known:
        held = table.get(case.name)
        if only not in case.name or (missing and held and held[0]["peak_error"]):
            continue
        try:
            table[case.name] = rows(case)
        except MemirError as error:
            empty = dict.fromkeys(COLUMNS, "")
            table[case.name] = [{**empty, "case": case.name, "verdict": f"exit {error.exit_code}: {error.message}"}]
        write(known, table)
        yield table[case.name]
