"""Real kinds of model changes: the bytes of real runs, the changed line, the order of growth.

The whole table is `python -m benchmarks.regressions --measure --write`, some minutes; here the committed one is held to its
promises, some pairs are compared anew, and one is run for real.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.regressions.cases import FOLDER, cases, measured
from benchmarks.regressions.judge import HEADER, TOLERANCE, Judged, judge, read_results
from memir.diff.lines import compare_sources
from memir.runtime.real import RealStep, measure_in_child

ROOT = Path(__file__).resolve().parents[1]
CASES = {case.name: case for case in cases()}
LIVE = ("head_untied", "mask_expanded", "no_grad_lost")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_table_keeps_its_promises() -> None:
    rows = read_results()
    runs = measured()
    assert [row["case"] for row in rows] == sorted(CASES)
    assert set(runs) == set(CASES)
    assert len(rows) >= 25
    for row in rows:
        real = runs[row["case"]][1] - runs[row["case"]][0]
        assert int(row["measured_delta"]) == real
        assert abs(int(row["delta"]) - real) <= TOLERANCE * abs(real), row["case"]
        assert int(row["delta"]) == int(row["after"]) - int(row["before"])
    assert all(row["order"] == "yes" for row in rows)
    assert sum(row["right_line"] == "yes" for row in rows) >= 23 / 25 * len(rows)


def test_every_pair_is_a_change_among_others() -> None:
    """A line is blamed out of several: most pairs have further, harmless changes."""
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders == set(CASES)
    several = 0
    for case in CASES.values():
        names = [case.file(version) for version in ("before", "after")]
        texts = [(ROOT / name).read_text() for name in names]
        sources = compare_sources([(names[0], texts[0], names[1], texts[1])])
        several += len(sources.hunks) > 1
        new = {sources.text(hunk, line) for hunk in sources.hunks for line in hunk.after}
        gone = {sources.text(hunk, line, removed=True) for hunk in sources.hunks for line in hunk.before}
        assert set(case.lines) & (gone if case.removed else new), case.name
    assert several == len(CASES)


@pytest.fixture(scope="module")
def live() -> dict[str, Judged]:
    runs = measured()
    return {name: judge(CASES[name], runs[name]) for name in LIVE}


@pytest.mark.parametrize("name", LIVE)
def test_a_pair_is_judged_as_the_table_says(live: dict[str, Judged], name: str) -> None:
    result = live[name]
    assert (result.is_exact, result.is_right_line, result.is_right_order) == (True, True, True)
    (row,) = [row for row in read_results() if row["case"] == name]
    assert dict(zip(HEADER, result.row, strict=True)) == row


def test_what_was_measured_is_measured_again() -> None:
    case = CASES["no_grad_lost"]
    runs = [RealStep(case.file(version), case.recipe, case.batch, case.seq) for version in ("before", "after")]
    assert tuple(measure_in_child(run).peak for run in runs) == measured()[case.name]
