"""The committed table of LLMem's choices: it is the data, and what it says holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.llmem_table3.facts import CARD, FACTS, MIB, RECIPES
from benchmarks.llmem_table3.predict import choice
from benchmarks.llmem_table3.table import (
    called_out_of_memory,
    csv_text,
    from_csv,
    markdown,
    of,
    ordered_pairs,
    right_choices,
    said_to_fit,
)

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "llmem_table3"
CELLS = from_csv((FOLDER / "results.csv").read_text())


def test_the_page_is_the_data() -> None:
    assert (FOLDER / "results.md").read_text() == markdown(CELLS)
    assert from_csv(csv_text(CELLS)) == CELLS


def test_every_cell_is_there() -> None:
    assert [(cell.model, cell.recipe) for cell in CELLS] == [(f.name, r.name) for f in FACTS for r in RECIPES]


def test_no_method_that_ran_is_called_out_of_memory() -> None:
    assert called_out_of_memory(CELLS) == []


def test_order_of_measured_times() -> None:
    right, pairs = ordered_pairs(CELLS)
    assert pairs == 17
    assert right / pairs >= 0.85


def test_choices_differ_only_where_the_paper_s_out_of_memory_cells_fit() -> None:
    """Six of nine are the paper's; in the others memir takes a method of which the paper says that it ran out of memory, and
    which fits by the paper's own equation, or one that did."""
    differing = [fact.name for fact in FACTS if choice(of(fact, CELLS)) != fact.chosen]
    assert right_choices(CELLS) == len(FACTS) - len(differing) >= 6
    assert set(differing) <= {fact.name for fact, _ in said_to_fit(CELLS)}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.model} {cell.recipe}")
def test_a_batch_is_one_that_fits(cell: object) -> None:
    assert bool(cell.batch) == (cell.total <= CARD * MIB) == bool(cell.samples)  # type: ignore[attr-defined]
