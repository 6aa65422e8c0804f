"""The committed table of predicted speeds: it is the data, it has all cases, and it holds what was aimed at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.throughput.cases import A100, CASES, H100
from benchmarks.throughput.table import csv_text, from_csv, markdown, median_factor, of_gpu, tau

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "throughput"
ROWS = from_csv((FOLDER / "results.csv").read_text())


def test_the_page_is_the_data() -> None:
    assert (FOLDER / "results.md").read_text() == markdown(ROWS)
    assert from_csv(csv_text(ROWS)) == ROWS


def test_every_case_is_there() -> None:
    assert [(row.name, row.measured, row.judged) for row in ROWS] == [(c.name, c.measured, c.judged) for c in CASES]


@pytest.mark.parametrize(("gpu", "count"), [(A100, 14), (H100, 6)])
def test_order_and_value(gpu: str, count: int) -> None:
    rows = of_gpu(ROWS, gpu)
    assert len(rows) == count
    assert tau(rows) >= 0.8
    assert median_factor(of_gpu(rows, gpu, judged=True)) <= 1.3


def test_context_parallel_rows_are_in_order() -> None:
    rows = [row for row in ROWS if not row.judged]
    assert len(rows) == 4
    assert tau(rows) == 1
