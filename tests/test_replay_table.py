"""The committed replay of published runs: it says what it measured, and keeps what was reached."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.replay import a100, t4
from benchmarks.replay.reasons import ROUTING, reason
from benchmarks.replay.rows import MIB, Row
from benchmarks.replay.table import csv_text, from_csv, markdown

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "replay"
ROWS = from_csv((FOLDER / "results.csv").read_text())


def rows(*values: str, source: str = "") -> list[Row]:
    return [row for row in ROWS if row.value in values and source in row.source]


def test_the_page_is_the_data() -> None:
    page = (FOLDER / "results.md").read_text().splitlines()
    assert page[6:] == markdown(ROWS).splitlines()[6:]  # before it the version of torch
    assert from_csv(csv_text(ROWS)) == ROWS


def test_every_published_run_is_there_with_its_figures() -> None:
    peaks = {(row.run, row.measured) for row in rows("peak", source="t4")}
    assert peaks == {(run.name, round(run.peak * MIB)) for run in t4.RUNS}
    assert [row.measured for row in rows("peak", source="a100")] == [fact.peak for fact in a100.FACTS]
    assert [row.measured for row in rows("steady", source="a100")] == [fact.steady for fact in a100.FACTS]
    assert len(rows("peak", "steady")) >= 50


def test_what_was_reached_is_kept() -> None:
    measured = [row for row in rows("peak", "steady") if row.source == "a100" or row.base]
    routed = {row.case for row in measured if reason(row) == ROUTING}  # README.md: routing is data
    assert routed == {f"Mixtral-8x7B baseline-peft-bnb B={batch} S=4096" for batch in (4, 8)}
    explained = [row for row in measured if not (row.case in routed and row.value == "peak")]
    assert max(abs(row.error_of_step) for row in explained) < 0.6  # percent, given what was measured before the step
    assert statistics.median(abs(row.error_of_step) for row in rows("peak", source="t4") if row.base) < 0.01
    assert sum(abs(row.error) <= 0.5 for row in rows("peak", "steady")) >= 0.95 * len(rows("peak", "steady"))
    assert max(abs(row.error) for row in explained if row.source == "a100") < 0.1
    assert max(abs(row.error) for row in rows("peak", "steady")) < 2
    assert statistics.median(abs(row.error) for row in rows("peak", "steady")) < 0.05
    assert statistics.median(abs(row.error) for row in rows("forward", "backward", "optimizer")) < 0.1
    assert statistics.median(abs(row.error) for row in rows("reserved")) < 2


def test_runs_of_one_load_differ_from_each_other() -> None:
    """So no prediction before the step can be exact: batch, length and attention are no part of the load."""
    before = [row.measured for row in rows("resident") if row.case.startswith("TinyLlama")]
    assert 7.9 * MIB < max(before) - min(before) < 8.1 * MIB
    played = {(row.least, row.most) for row in rows("resident") if row.case.startswith("TinyLlama")}
    assert len(played) == 1
    assert played != {(0, 0)}


def test_every_peak_that_is_off_has_its_reason() -> None:
    assert all(reason(row) not in ("", "not explained") for row in rows("peak", "steady") if abs(row.error) > 0.5)
