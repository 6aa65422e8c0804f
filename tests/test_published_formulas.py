"""Published formulas: the committed table accounts for every difference, and one of them is derived here."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.formulas.cases import NUM_POINTS, NUM_WIDTHS, PRESETS, REAL
from benchmarks.formulas.table import markdown as formulas_page
from benchmarks.formulas.table import read
from benchmarks.published_formulas.cases import CASES, MEGATRON, Case
from benchmarks.published_formulas.derive import derive
from memir.derivation.step import ORDER
from memir.derivation.write_text import origins
from memir.ir.sizetext import parse_size

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # targets of the cases are paths from there


def test_the_table_has_every_case_and_no_difference_without_an_account() -> None:
    with (ROOT / "benchmarks" / "published_formulas" / "results.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert list(rows) == [case.name for case in CASES]
    for case in CASES:
        row = rows[case.name]
        assert row["accounted_for"] == "True"
        assert row["published"] == case.published
        derived = parse_size(row["derived"].replace("**", "^").replace("ceiling", "ceil"))
        assert derived - parse_size(case.published) is case.expected()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.target == MEGATRON and not case.sets][:1], ids=lambda c: c.name
)
def test_the_activations_of_a_layer_are_korthikantis(case: Case) -> None:
    result = derive(case)
    assert result.is_accounted_for
    made = {term.size.text(ORDER): origins(term) for term in result.terms}
    assert made["5*B*S^2*a"] == [
        "3 core.dropout: native_dropout",
        "2 core: _softmax",
    ]  # an output and a mask of bytes, an output
    assert made["4*B*S*f"] == ["2 layers.*: gelu", "2 up: addmm"]  # 16 h of the 34, f being 4 h
    assert "6 qkv: addmm" in made["18*B*S*h"]
    assert sum(int(origin.split()[0]) for origin in made["18*B*S*h"]) == 18


def test_formulas_are_equal_to_fresh_traces_at_every_committed_point() -> None:
    rows = read()
    analyses = [row for row in rows if row.how == "analysis"]
    assert {row.preset for row in analyses} == set(PRESETS)
    for preset in PRESETS:
        here = [row for row in analyses if row.preset == preset]
        assert len({row.where for row in here}) == NUM_POINTS + NUM_WIDTHS
    assert all(row.formula == row.fresh for row in analyses)
    assert (ROOT / "benchmarks" / "formulas" / "results.md").read_text() == formulas_page(rows)


def test_formulas_are_within_a_kibibyte_of_real_steps() -> None:
    real = [row for row in read() if row.how == "real step"]
    assert {row.preset for row in real} == set(REAL)
    assert all(row.is_equal for row in real)
