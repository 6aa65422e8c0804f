"""Quantized weights: memir's stand-in, which needs no package, against a real step with bitsandbytes' and PEFT's own code."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.accuracy_cpu.cases import Case
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.accuracy_cpu.run import Figures, measured, predicted
from memir.recipe import Lora, Quantize, Recipe
from tests.figures import assert_same

RECIPE = Recipe(target="cpu", dtype="f32", lora=Lora(r=8, targets=("q_proj", "v_proj", "down_proj")), quantize=Quantize())
GPT2 = dataclasses.replace(RECIPE, lora=Lora(r=8, targets=("c_attn", "c_fc")))


def case(model: str, name: str, recipe: Recipe, **changes: object) -> Case:
    return Case(model, name, dataclasses.replace(recipe, **changes), 2, 128)  # type: ignore[arg-type]


CASES = {
    one.name: one
    for one in (
        case("llama", "nf4", RECIPE),
        case("llama", "nf4,double", RECIPE, quantize=Quantize(double=True)),
        case("llama", "nf4-checkpoint", RECIPE, checkpoint="full"),
        case("llama", "nf4-bf16", RECIPE, dtype="bf16"),
        case("llama", "nf4,keep-bf16", RECIPE, dtype="bf16", quantize=Quantize(keep=True)),
        case("gpt2", "fp4", GPT2, quantize=Quantize("fp4")),
        case("gpt2", "fp4,double-checkpoint", GPT2, quantize=Quantize("fp4", double=True), checkpoint="full"),
    )
}
TOLERANCE = 1024  # bytes: Python numbers that autograd keeps


@pytest.fixture(scope="module")
def truth() -> dict[str, Figures]:
    """Every case run for real, each in a fresh process."""
    return {figures.case: figures for figures in each_in_fresh_process(measured, list(CASES.values()), jobs=2)}


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_the_allocator_saw(name: str, truth: dict[str, Figures]) -> None:
    assert_same(truth[name], predicted(CASES[name]), TOLERANCE)
