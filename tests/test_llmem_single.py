"""The committed table of LLMem's single-GPU rows: it is the data, and says no more than can be said."""

from __future__ import annotations

from pathlib import Path

from benchmarks.llmem_single.facts import CARD, FACTS, MIB
from benchmarks.llmem_single.table import csv_text, from_csv, markdown

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "llmem_single"
ROWS = from_csv((FOLDER / "results.csv").read_text())


def test_the_page_is_the_data() -> None:
    assert (FOLDER / "results.md").read_text() == markdown(ROWS)
    assert from_csv(csv_text(ROWS)) == ROWS


def test_every_row_is_there_and_within_a_sequence() -> None:
    assert [(row.name, row.measured, row.llmem) for row in ROWS] == [(f.name, f.measured * MIB, f.llmem * MIB) for f in FACTS]
    for row in ROWS:
        assert row.at_batch <= CARD * MIB < row.at_batch + row.a_sample
        assert abs(row.at_batch - row.measured) < row.a_sample
        assert row.batch <= row.most
