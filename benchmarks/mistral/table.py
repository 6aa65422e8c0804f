"""Rows as text for people (results.md) and as data (results.csv)."""

from __future__ import annotations

import csv
import importlib.metadata
import io
from collections.abc import Sequence

from benchmarks.mistral.facts import RAN_WITH, SEQ
from benchmarks.mistral.rows import Row

COMMAND = "python -m benchmarks.mistral"
COLUMNS = (
    "method loop batch seq measured_peak predicted_peak error percent with_terms residue "
    "measured_steady predicted_steady steady_residue bytes_a_parameter place"
)
VERSIONED = ("memir", "torch", "transformers", "peft", "accelerate")


def versions() -> str:
    """`torch 2.13.0, transformers 4.48.1, ...` of this environment."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONED)


def csv_text(rows: Sequence[Row]) -> str:
    """One line a row: figures in bytes, errors in bytes and percent, the place of the peak."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS.split())
    for row in rows:
        fact = row.fact
        terms = sum(term.nbytes for term in row.terms)
        figures = (
            fact.peak,
            row.peak,
            row.peak - fact.peak,
            f"{_percent(row.peak, fact.peak):.4f}",
            row.peak + terms,
            row.residue(),
        )
        steady = (fact.steady, row.steady, row.steady_residue(), f"{row.bytes_a_parameter:.4f}")
        writer.writerow((row.loop.method, row.loop.name, fact.batch, SEQ, *figures, *steady, row.place))
    return out.getvalue()


def markdown(rows: Sequence[Row]) -> str:
    """The page: a table of peaks, a table of the steady state, and the terms of each row."""
    lines = [
        "# Mistral-7B, S=4096, one A100: predicted and measured",
        "",
        f"`{COMMAND}` wrote this page, with {versions()}.",
        f"Measured with {RAN_WITH}; the source of the figures is in facts.py. All figures are bytes.",
        "",
        "| method | loop | B | measured peak | predicted | error | with the terms below | left |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        terms = sum(term.nbytes for term in row.terms)
        left = f"{row.residue():+,} ({100 * row.residue() / row.fact.peak:+.4f} %)"
        lines.append(
            f"| {row.loop.method} | {row.loop.name} | {row.fact.batch} | {row.fact.peak:,} | {row.peak:,} "
            f"| {_percent(row.peak, row.fact.peak):+.3f} % | {row.peak + terms:,} | {left} |"
        )
    lines += [
        "",
        "| method | loop | B | measured between steps | predicted | with the terms | left |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        terms = sum(term.nbytes for term in row.steady_terms)
        lines.append(
            f"| {row.loop.method} | {row.loop.name} | {row.fact.batch} | {row.fact.steady:,} | {row.steady:,} "
            f"| {row.steady + terms:,} | {row.steady_residue():+,} |"
        )
    lines += [
        "",
        "| method | loop | B | the peak is in | bytes a parameter | terms that the trace leaves to the GPU |",
        "|---|---|---:|---|---:|---|",
    ]
    for row in rows:
        named = "; ".join(f"{term.name}: {term.nbytes:,}" for term in row.terms if term.nbytes)
        lines.append(
            f"| {row.loop.method} | {row.loop.name} | {row.fact.batch} | {row.place} | {row.bytes_a_parameter:.2f} | {named} |"
        )
    return "\n".join(lines) + "\n"


def _percent(predicted: int, measured: int) -> float:
    return 100 * (predicted - measured) / measured
