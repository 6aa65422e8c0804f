"""Measured steps beside memir's predictions, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.gpu.cases import CASES
from benchmarks.replay.predict import predict, step


def page(measured: Iterable[Mapping[str, Any]]) -> str:
    """A row a value: steady, peak, each phase, reserved, in bytes with the error in percent."""
    lines = ["| case | value | measured | predicted | error |", "|---|---|---:|---:|---:|"]
    by_name = {case.name: case for case in CASES}
    for row in measured:
        case = by_name[row["case"]]
        if "error" in row:
            lines.append(f"| {case.name} | did not run: {row['error']} | | | |")
            continue
        recipe = replace(case.recipe, gpu=row["compute"])
        found = predict(step(case.preset, recipe, case.batch, case.seq, case.sets), row["compute"])
        values = [
            ("steady", row["steady"], found.steady),
            ("peak", row["peak"], found.peak),
            *((name, peak, found.phases[name]) for name, peak in row["phases"].items() if name in found.phases),
            ("reserved", row["reserved"], found.reserved),
        ]
        for name, real, told in values:
            lines.append(f"| {case.name} | {name} | {real:,} | {told:,} | {100 * (told - real) / real:+.3f} % |")
    return "\n".join(lines) + "\n"
