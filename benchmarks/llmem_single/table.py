"""The rows as data and as a page for people."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import pages
from benchmarks.llmem_single.facts import MIB
from benchmarks.llmem_single.predict import Row

TEXT = """# LLMem's four single-GPU rows

`python -m benchmarks.llmem_single --save` wrote this page. MiB. A Tesla V100-16GB, 512 tokens, fp16 with an fp32 copy and fp32
Adam, gradients in the parameters' place, every layer checkpointed (facts.py has the source). "batch" is the largest that memir
says fits 16384 MiB: with the most and with the least that a CUDA context may take. "error" is of memir's bytes at that batch
against what LLMem measured at its own, which is not published.
"""
NOTES = """
What can be said: at the largest batch that memir finds, the device holds what LLMem measured, to less than one sequence. What
cannot be said: whether the batches are the same, so whether that is a right prediction. Any estimate whose batch is the largest
that fits ends within one sequence of the card's limit, whatever its error at a given batch; so do LLMem's own 0.4 to 1.6 %.
From LLMem's published estimates and its formula its batches would be about 87, 63, 10 and 32.

Not described: Gemini's chunks (a chunk's unused end, and parameters gathered in it), the 2 MiB pages that LLMem rounds to,
fragmentation, the code of the layers in transformers 4.29.2 (that of today is taken; the loss is that of 4.29.2), and the
V100's own context with CUDA 11.7 (the range is that of other cards; with all kernels loaded at once it was 1,343 MiB).
"""


def csv_text(rows: Sequence[Row]) -> str:
    """One line a model; bytes."""
    return pages.csv_text(Row, rows)


def from_csv(text: str) -> list[Row]:
    """The rows that `csv_text` wrote."""
    return pages.from_csv(Row, text)


def markdown(rows: Sequence[Row]) -> str:
    """The page."""
    lines = [TEXT, "| model | parameters | batch | memir | measured | error | one sequence more | LLMem's error | peak in |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for row in rows:
        batch = f"{row.batch}" if row.batch == row.most else f"{row.batch} to {row.most}"
        figures = f"{row.at_batch / MIB:,.0f} | {row.measured // MIB:,} | {row.error:+.1f} % | {row.a_sample / MIB:,.0f}"
        theirs = f"{100 * (row.llmem / row.measured - 1):+.1f} %"
        lines.append(f"| {row.name} | {row.parameters:,} | {batch} | {figures} | {theirs} | {row.place} |")
    return "\n".join(lines) + "\n" + NOTES
