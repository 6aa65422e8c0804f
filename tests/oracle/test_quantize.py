"""Quantized weights: memir's stand-in, which needs no package, against a real step with bitsandbytes' and PEFT's own code."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from benchmarks.accuracy_cpu.cases import Case
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.accuracy_cpu.run import Figures, measured, predicted
from memir.frontend import quantize
from memir.frontend.quantize_int8 import Linear8bit
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
        case("llama", "int8-checkpoint", RECIPE, quantize=Quantize("int8"), checkpoint="full"),
        case("gpt2", "int8-bf16", GPT2, quantize=Quantize("int8"), dtype="bf16"),
    )
}
AS_ON_CUDA = {
    one.name: one
    for one in (
        case("llama", "int8", RECIPE, quantize=Quantize("int8")),
        case(
            "llama", "int8,keep-bf16-checkpoint", RECIPE, quantize=Quantize("int8", keep=True), dtype="bf16", checkpoint="full"
        ),
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


def measured_as_on_cuda(one: Case) -> Figures:
    """The step run with the autograd function that bitsandbytes takes on CUDA; its kernels are those for the CPU."""
    import bitsandbytes
    from bitsandbytes.autograd._functions import MatMul8bitLt

    def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: object) -> torch.Tensor:
        product: torch.Tensor = MatMul8bitLt.apply(x, weight, None, bias, state)
        return product

    with mock.patch.object(bitsandbytes, "matmul", matmul):
        return measured(one)


@pytest.fixture(scope="module")
def as_on_cuda() -> dict[str, Figures]:
    """The cases of `AS_ON_CUDA` run for real."""
    return {figures.case: figures for figures in each_in_fresh_process(measured_as_on_cuda, list(AS_ON_CUDA.values()), jobs=2)}


@pytest.mark.parametrize("name", AS_ON_CUDA)
def test_int8_keeps_what_its_function_for_cuda_keeps(name: str, as_on_cuda: dict[str, Figures]) -> None:
    """The peaks lie outside of the kernels, where all inputs of quantized layers are alive, checkpointed or not."""
    with mock.patch.object(quantize, "Linear8bit", lambda layer, on_cuda: Linear8bit(layer, True)):
        told = predicted(AS_ON_CUDA[name])
    assert_same(as_on_cuda[name], told, TOLERANCE)
