"""Rows as data (results.csv) and as a page (results.md)."""

from __future__ import annotations

import csv
import importlib.metadata
import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.formulas.run import Row

COMMAND = "python -m benchmarks.formulas"
COLUMNS = ("preset", "how", "quantity", "where", "formula", "fresh", "difference")
HERE = Path(__file__).resolve().parent


def csv_text(rows: Sequence[Row]) -> str:
    """One line a row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=lambda row: (row.preset, row.how)):
        writer.writerow((row.preset, row.how, row.quantity, row.where, row.formula, row.fresh, row.formula - row.fresh))
    return out.getvalue()


def read(path: Path = HERE / "results.csv") -> list[Row]:
    """The committed rows."""
    with path.open(newline="") as file:
        return [
            Row(r["preset"], r["where"], r["quantity"], int(r["formula"]), int(r["fresh"]), r["how"])
            for r in csv.DictReader(file)
        ]


def markdown(rows: Sequence[Row]) -> str:
    """A line a preset: how many values were compared, how many are equal, the largest difference."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("memir", "torch", "transformers"))
    lines = [
        "# Formulas over widths beside fresh traces and real steps",
        "",
        f"`{COMMAND}` wrote this page, with {versions}.",
        "",
    ]
    lines += [
        "An analysis is a new trace, without symbols for widths, at the point or at another B, S and L of the same widths;"
    ]
    lines += ["it must be equal to the byte. A real step ran on the CPU with random weights, and"]
    lines += ["the allocator's figure may differ by the Python numbers that autograd keeps as tensors of 8 bytes.", ""]
    lines += ["| preset | beside | values | equal | largest difference, bytes |", "|---|---|---:|---:|---:|"]
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.preset, row.how].append(row)
    for (preset, how), group in sorted(groups.items()):
        exact = sum(row.formula == row.fresh for row in group)
        worst = max(abs(row.formula - row.fresh) for row in group)
        lines.append(f"| {preset} | {how} | {len(group)} | {exact} | {worst} |")
    return "\n".join(lines) + "\n"
