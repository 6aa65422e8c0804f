"""Rows as a page for people and as data."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.replay.reasons import LEFT_OUT, reason
from benchmarks.replay.rows import Row

COLUMNS = (
    *("source", "run", "case", "value", "measured", "predicted", "base", "least", "most"),
    *("error_percent", "error_of_step_percent"),
)


def csv_text(rows: Sequence[Row]) -> str:
    """One line a value; bytes and percent."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_dict() for row in rows)
    return out.getvalue()


def from_csv(text: str) -> list[Row]:
    """The rows that `csv_text` wrote."""
    rows = csv.DictReader(io.StringIO(text))
    return [
        Row(
            *(r["source"], r["run"], r["case"], r["value"], int(r["measured"]), int(r["predicted"])),
            *(int(r["base"]), int(r["least"]), int(r["most"])),
        )
        for r in rows
    ]


def summary(name: str, errors: Iterable[float]) -> str:
    """A line of the summary: how many, the median, the ninth in ten, the largest; absolute percent."""
    found = sorted(map(abs, errors))
    ninth = found[min(len(found) - 1, int(0.9 * len(found)))]
    within = sum(e <= 0.5 for e in found)
    figures = f"{statistics.median(found):.3f} % | {ninth:.3f} % | {found[-1]:.3f} %"
    return f"| {name} | {len(found)} | {figures} | {within} of {len(found)} |"


def markdown(rows: Sequence[Row]) -> str:
    """The page: a summary by group, then every value with its error and, beyond half a percent, the reason."""
    allocated = [row for row in rows if row.value in ("peak", "steady")]
    phases = [row for row in rows if row.value in ("forward", "backward", "optimizer")]
    reserved = [row for row in rows if row.value == "reserved"]
    lines = [
        "# Published measurements, predicted and measured",
        "",
        f"`python -m benchmarks.replay --save` wrote this page, with torch {importlib.metadata.version('torch')}.",
        "The sources are in t4.py and a100.py. Bytes.",
        "",
        "| values | number | median error | nine in ten within | largest | within 0.5 % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    groups = (
        ("allocated: peak, steady", [row.error for row in allocated]),
        ("of these A100", [row.error for row in allocated if row.source == "a100"]),
        ("of these T4", [row.error for row in allocated if row.source == "t4"]),
        (
            "peaks of the T4, given what was measured before the step",
            [r.error_of_step for r in allocated if r.value == "peak" and r.base],
        ),
        ("before the first step, T4", [row.error for row in rows if row.value == "resident"]),
        ("phases of the T4", [row.error for row in phases]),
        ("phases of the T4, given what was measured before the step", [row.error_of_step for row in phases]),
        ("reserved, T4", [row.error for row in reserved]),
    )
    lines += [summary(name, errors) for name, errors in groups if errors]
    for source in dict.fromkeys(row.source for row in rows):
        lines += [
            "",
            f"## {source}",
            "",
            "| run | value | measured | predicted | error | of the step | |",
            "|---|---|---:|---:|---:|---:|---|",
        ]
        for row in rows:
            if row.source == source:
                step = f"{row.error_of_step:+.3f} %" if row.base and row.value != "resident" else ""
                if row.most > row.least:
                    step = f"{row.least:,} to {row.most:,}"
                figures = f"{row.measured:,} | {row.predicted:,} | {row.error:+.3f} % | {step}"
                lines.append(f"| {row.case} | {row.value} | {figures} | {reason(row)} |")
    lines += ["", "## Left out", "", *(f"- {text}" for text in LEFT_OUT)]
    return "\n".join(lines) + "\n"
