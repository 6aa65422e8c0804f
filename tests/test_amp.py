"""Autocast on CUDA, told apart from the CPU's, against the lists that this PyTorch has registered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memir
from memir.frontend import amp
from memir.ir.core import Program
from memir.recipe import Lora, Quantize, Recipe

SMALL_GPT = str(Path(__file__).parent / "cases" / "small_gpt.py")


def registered(key: str) -> set[str]:
    """Operators with a kernel of their own for the key, without the overloads that write into `out`."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if "aten::" in name and "out" not in name.partition(".")[2]}


def test_every_operator_of_cudas_lists_is_the_cpus_or_ours() -> None:
    ours = {operator.name().removeprefix("aten::") for operator, _ in amp._kernels()}
    left = registered("AutocastCUDA") - registered("AutocastCPU") - ours
    known = (
        "thnn",
        "lstm",
        "gru",
        "rnn",
        "conv",
        "upsample",
        "grid_sampl",
        "Dimname",
        "dimname",
        "linalg_",
        "binary_cross_entropy",
    )
    known += ("_scaled_dot_product_flash_attention", "frobenius_norm")  # called after the choice of a kernel; by no model
    promoted = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add"}
    assert {name for name in left if not any(word in name for word in known)} - promoted == set()


def test_pytorch_is_as_it_was_afterwards() -> None:
    before = registered("AutocastCPU")
    with amp.cuda_autocast("bf16"):
        assert "rsqrt" in registered("AutocastCPU")
    assert registered("AutocastCPU") == before
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.rsqrt(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def program(target: str, dtype: str = "f32", kind: str = "bf16") -> Program:
    return memir.trace(SMALL_GPT, Recipe(target=target, dtype=dtype, amp=kind), batch=2, seq=16).program


def results(found: Program, opcode: str, phase: str = "forward") -> list[str]:
    return [op.results[0].dtype for p, op in found.ops() if op.opcode == opcode and p.name == phase]


def test_the_loss_stays_16_bit_on_cuda_and_nll_loss_widens_it() -> None:
    assert results(program("cuda"), "aten._log_softmax") == ["bf16"]
    assert results(program("cpu"), "aten._log_softmax") == ["f32"]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_weights_are_cast_once_and_the_products_are_16_bit(kind: str) -> None:
    found = program("cuda", kind=kind)
    products = results(found, "aten.mm") + results(found, "aten.addmm")
    assert products
    assert set(products) == {kind}
    casts = [
        op for p, op in found.ops() if p.name == "forward" and op.opcode == "aten._to_copy" and op.results[0].dtype == kind
    ]
    parameters = {s.name for s in found.storages if s.kind == "parameter"}
    of = {v.name: v.storage for v in found.values}
    cast = [of[op.operands[0]] for op in casts if of.get(op.operands[0]) in parameters]
    assert len(cast) == len(set(cast)) > 0


def test_attention_is_computed_in_16_bits(tmp_path: Path) -> None:
    """Llama's rotary embedding widens query and key to fp32, and leaves value."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, '
        '"num_attention_heads": 4}'
    )
    recipe = Recipe(dtype="f32", amp="bf16")
    found = memir.trace(str(tmp_path / "config.json"), recipe, batch=2, seq=16).program
    assert results(found, "aten._scaled_dot_product_flash_attention") == ["bf16"]


def test_peft_asks_for_cudas_autocast_and_makes_no_fp32_copy(tmp_path: Path) -> None:
    """peft/tuners/lora/bnb.py: the input is cast to the adapters' dtype only where `torch.is_autocast_enabled()` is false."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, '
        '"num_attention_heads": 4}'
    )
    recipe = Recipe(amp="bf16", lora=Lora(r=4, targets=("q_proj",)), quantize=Quantize(keep=True))
    copies = {}
    for target in ("cuda", "cpu"):  # on the CPU the question is CUDA's too, and the answer no
        found = memir.trace(str(tmp_path / "config.json"), replace(recipe, target=target), batch=2, seq=16).program
        wide = [op for p, op in found.ops() if p.name == "forward" and op.opcode == "aten._to_copy" and "q_proj" in op.path]
        copies[target] = sum(op.results[0].dtype == "f32" and len(op.results[0].shape) == 3 for op in wide)
    assert copies["cuda"] == 0
    assert copies["cpu"] > 0
