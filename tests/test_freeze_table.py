"""The freezing benchmark: its page says what was measured, predictions find their place, its text ships with Python."""

from __future__ import annotations

import json

import pytest

from benchmarks.freeze import table
from benchmarks.freeze.__main__ import PREDICT
from benchmarks.freeze.setting import CUTS, SIZES, VOCABULARY
from benchmarks.freeze.text import sources, topics


def test_the_page_is_that_of_the_results() -> None:
    results = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    assert table.PAGE.read_text(encoding="utf-8") == table.page(results, PREDICT)
    assert [int(cut) for cut in results["memory"]] == list(CUTS)


def test_what_is_measured_is_a_decoder_of_some_size() -> None:
    assert SIZES["dim"] >= 512
    assert VOCABULARY >= 8000
    assert len(CUTS) >= 5


RESULTS = {
    "memory": {
        "0": {"at_start": 100, "peak": 2_000, "at_end": 100, "op": "aten::mm"},
        "2": {"at_start": 50, "peak": 1_000, "at_end": 50, "op": "aten::mm"},
    },
    "steps": {
        "batch": 8,
        "seq": 64,
        "vocabulary": 8192,
        "rounds": 3,
        "threads": 1,
        "cuts": {
            "0": {"cpu_seconds": 2.0, "wall_seconds": 4.0},
            "2": {"cpu_seconds": 1.0, "wall_seconds": 3.0},
            "2 cached": {"cpu_seconds": 0.5, "wall_seconds": 1.0},
        },
    },
}


def cells(page: str, cut: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith(f"| {cut} |")]


def test_measured_only() -> None:
    page = table.page(RESULTS, None)
    assert "predicted" not in page
    memory, steps = cells(page, "2")
    assert memory == ["2", "50", "1,000", "0.0", "`aten::mm`"]
    assert steps == ["2", "1.000", "0.500", "0.750", "0.250", "0.250"]


def test_predictions_stand_beside_what_was_measured() -> None:
    memory, steps = cells(table.page(RESULTS, lambda cut: (2_000 - 495 * cut, 1 - 0.225 * cut)), "2")
    assert memory[-2:] == ["1,010", "+10"]
    assert steps[-2:] == ["0.550", "+10.0 %"]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_every_seed_was_trained_both_ways_with_a_cache_that_served(seed: str) -> None:
    results = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    row = results["finetune"]["seeds"][seed]
    assert row["autofreeze"]["cache"]["problem"] == ""
    assert row["autofreeze"]["cache"]["hits"] > 0
    assert len(row["full"]["cpu_seconds"]) == len(row["autofreeze"]["cpu_seconds"]) == results["finetune"]["epochs"]
    assert row["full"]["accuracy"] > row["before"]["accuracy"]


def test_the_text_ships_with_python() -> None:
    train, test = topics()
    paragraphs = [{part for text in texts for part in text.split("\n\n")} for texts in (train, test)]
    assert not paragraphs[0] & paragraphs[1]
    assert min(sum(map(len, train)), sum(map(len, test))) > 50_000
    assert sum(map(len, sources())) > 2_000_000
