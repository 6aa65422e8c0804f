"""Optimizers that are described without their package, and those that are traced, against a real step on the CPU."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.accuracy_cpu.cases import Case
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.accuracy_cpu.run import Figures, measured, predicted
from memir.recipe import Recipe
from tests.figures import assert_same

TOLERANCE = 16  # bytes: Python numbers that become tensors of an operator
OPTIMIZERS = (  # 16 tokens: the peak lies in the optimizer step
    ("adamw_8bit", "bf16"),
    ("paged-adam-32bit", "f32"),
    ("lion", "bf16"),
    ("lion-8bit", "f32"),
    ("rmsprop-8bit", "bf16"),
    ("transformers-adafactor", "bf16"),
    ("muon", "f32"),
)
CASES = {
    f"{name} {dtype}": Case("llama", f"{name} {dtype}", Recipe(target="cpu", dtype=dtype, optimizer=name), 2, 16)
    for name, dtype in OPTIMIZERS
}


@pytest.fixture(scope="module")
def truth() -> dict[str, Figures]:
    """Every case run for real, each in a fresh process."""
    return {figures.case: figures for figures in each_in_fresh_process(measured, list(CASES.values()), jobs=2)}


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_the_allocator_saw(name: str, truth: dict[str, Figures]) -> None:
    assert_same(truth[CASES[name].name], predicted(CASES[name]), TOLERANCE)


def test_embeddings_keep_wide_states_where_the_trainer_builds_the_optimizer(truth: dict[str, Figures]) -> None:
    """The same optimizer by its package's defaults has the embedding's two states in 8 bits with a scale for 256."""
    case = CASES["adamw_8bit bf16"]
    plain = predicted(dataclasses.replace(case, recipe=dataclasses.replace(case.recipe, optimizer="adamw-8bit")))
    elements = 3200 * 192
    assert truth[case.name].at_start - plain.at_start == 2 * (4 * elements - elements - 4 * elements // 256)
