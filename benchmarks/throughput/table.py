"""The rows as data and as a page for people, and the figures that sum them up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median

from benchmarks import pages
from benchmarks.throughput.predict import Row

TEXT = """# Predicted training speed beside published runs

`python -m benchmarks.throughput --save` wrote this page. Tokens per second and GPU. The operators are those of the traced
step; rates, bandwidths and latencies are of public measurements of single kernels and of NCCL's own model
([docs/cost-model.md](../../docs/cost-model.md)); nothing is fitted to these rows. cases.py has the sources.
"""
NOTES = """
"factor" is predicted over measured. Seconds of a step: matrix products, attention, everything else by its bytes; the
optimizer; communication, and what of it is not hidden by computing.

- Every run is predicted a little too fast: loading data, logging, and operators that read or write with strides are not in the
  model, and published speeds are of whole runs.
- Two GPUs with small batches are the farthest off: FSDP1's own host time (hooks, flat parameters, views) is not in the model,
  which shows where a layer takes a few milliseconds (SantaCoder).
- Mixtral is traced as today's transformers runs its experts, with grouped products; 4.48.1, which was measured, looped over
  them.
- The rows with CP ran compiled and in float8 and are predicted in bf16, eager: their order is judged, not their value.
"""


def tau(rows: Sequence[Row]) -> float:
    """Kendall's rank correlation (tau-a: no two runs are equal) of measured and predicted."""
    pairs = list(combinations(rows, 2))
    agree = sum(1 if (a.measured - b.measured) * (a.predicted - b.predicted) > 0 else -1 for a, b in pairs)
    return agree / len(pairs)


def median_factor(rows: Sequence[Row]) -> float:
    """The median of max(factor, 1/factor)."""
    return median(max(row.factor, 1 / row.factor) for row in rows)


def of_gpu(rows: Sequence[Row], gpu: str, *, judged: bool = False) -> list[Row]:
    """The rows of a GPU type; only those that are judged by their value, if asked."""
    return [row for row in rows if row.gpu == gpu and (row.judged or not judged)]


def csv_text(rows: Sequence[Row]) -> str:
    """One line a run."""
    return pages.csv_text(Row, rows)


def from_csv(text: str) -> list[Row]:
    """The rows that `csv_text` wrote."""
    return pages.from_csv(Row, text)


def markdown(rows: Sequence[Row]) -> str:
    """The page."""
    lines = [TEXT, "| run | measured | predicted | factor | products | attention | bytes | optimizer | comm. | exposed |"]
    lines.append("|---|" + "---:|" * 9)
    for row in rows:
        factor = f"{row.factor:.2f}" if row.judged else f"({row.factor:.2f})"
        seconds = (row.products, row.attention, row.memory, row.optimizer, row.communicated, row.exposed)
        times = " | ".join(f"{one:.3f}" for one in seconds)
        lines.append(f"| {row.name} | {row.measured:,.0f} | {row.predicted:,.0f} | {factor} | {times} |")
    lines += ["", "| GPU | rows | Kendall's tau | rows by value | median factor |", "|---|---:|---:|---:|---:|"]
    for gpu in dict.fromkeys(row.gpu for row in rows):
        every, judged = of_gpu(rows, gpu), of_gpu(rows, gpu, judged=True)
        lines.append(f"| {gpu} | {len(every)} | {tau(every):.2f} | {len(judged)} | {median_factor(judged):.2f} |")
    return "\n".join(lines) + "\n" + NOTES
