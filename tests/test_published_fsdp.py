"""The committed table of published runs under FSDP: it says what it measured, and keeps what was reached."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.distributed.published import FACTS, TITAN_RESERVED, holds, page
from benchmarks.replay.table import from_csv

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "distributed"
ROWS = from_csv((FOLDER / "published.csv").read_text())


def test_the_page_is_the_data() -> None:
    written = (FOLDER / "published.md").read_text().splitlines()
    assert written[4:] == page(ROWS).splitlines()[4:]  # before it the version of torch


def test_every_run_is_there_with_its_figures() -> None:
    assert [row.measured for row in ROWS if row.value == "peak"] == [fact.peak for fact in FACTS]
    assert [row.measured for row in ROWS if row.value == "steady"] == [fact.steady for fact in FACTS]
    assert [row.measured for row in ROWS if row.value == "reserved"] == [TITAN_RESERVED]


def test_what_was_reached_is_kept() -> None:
    assert holds(ROWS)
    mistral = [abs(row.error) for row in ROWS if row.case.startswith("Mistral")]
    assert max(mistral) < 0.02  # percent
    assert statistics.median(abs(row.error) for row in ROWS) < 0.02
