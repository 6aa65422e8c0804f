"""`--attention flash-attn-2`: what the package keeps and takes, worked out from flash_api.cpp and flash_attn_interface.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import transformers.modeling_flash_attention_utils as utils
import transformers.modeling_utils as models

import memir
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Op, Program
from memir.recipe import Recipe

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 80,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FLASH = Recipe(attention="flash-attn-2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@cache
def program(target: str, recipe: Recipe = FLASH) -> Program:
    return memir.trace(target, recipe, batch=2, seq=200).program


def ops(found: Program, opcode: str) -> list[Op]:
    return [op for op, _ in found.counted({}) if op.opcode == opcode]


def test_what_is_kept_for_backward(llama: str) -> None:
    """Heads of 20 are padded to 24; grouped keys and values stay 2 heads; sums [B, H, S] in fp32; two numbers of int64."""
    found = program(llama)
    nbytes = {s.name: str(s.nbytes) for s in found.storages}
    forward = ops(found, "flash_attn._flash_attn_forward")[0]
    out = forward.results[0]
    assert [nbytes[v.storage] for v in forward.results] == [f"{2 * 4 * 24}*B*S", f"{4 * 4}*B*S", "16"]
    assert [str(e) for e in out.shape] == ["B", "S", "4", "24"]
    assert not any("S^2" in text for text in nbytes.values())  # no mask, no scores


def test_autograd_keeps_what_the_package_saves(tmp_path: Path) -> None:
    """Heads of 32, which need no padding: query, key, value, output, sums and the generator's state, `save_for_backward`."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "hidden_size": 128}))
    found = program(str(path))
    nbytes = {s.name: str(s.nbytes) for s in found.storages}
    forward = ops(found, "flash_attn._flash_attn_forward")[0]
    assert sorted(nbytes[name] for name in forward.saves) == sorted(
        [f"{2 * 128}*B*S", f"{2 * 64}*B*S", f"{2 * 64}*B*S", f"{2 * 128}*B*S", f"{4 * 4}*B*S", "16"]
    )


def test_the_backwards_workspace(llama: str) -> None:
    """softmax_d, dq_accum with rows rounded to 128 and heads to 32, and dk, dv of all heads: at B=2, S=200."""
    backward = ops(program(llama), "flash_attn._flash_attn_backward")[0]
    expected = 2 * 4 * 256 * 4 + 2 * 256 * 4 * 32 * 4 + 2 * 2 * 200 * 4 * 24 * 2
    assert backward.scratch.evaluate({"B": 2, "S": 200}) == expected
    assert [v.dtype for v in backward.results] == ["bf16"] * 3


def test_trainers_mask_of_ones_makes_no_4d_mask(llama: str) -> None:
    found = program(llama, Recipe(attention="flash-attn-2", loop="trainer", amp="bf16", dtype="f32"))
    assert ops(found, "flash_attn._flash_attn_forward")
    assert not any("S^2" in str(s.nbytes) for s in found.storages)


def test_transformers_is_as_it_was_afterwards(llama: str) -> None:
    before = (utils.lazy_import_flash_attention, models.lazy_import_flash_attention)
    program(llama)
    assert (utils.lazy_import_flash_attention, models.lazy_import_flash_attention) == before
    assert "flash_attn_func" not in vars(utils)
    check = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["general_availability_check"]
    assert check is utils.is_flash_attn_2_available


def test_fp32_is_refused_as_the_package_does(llama: str) -> None:
    with pytest.raises(UsageError, match="only support fp16 and bf16"):
        program(llama, Recipe(attention="flash-attn-2", dtype="f32"))


def test_padding_is_not_described(llama: str) -> None:
    with pytest.raises(InconclusiveError, match="not described"):
        program(llama, Recipe(attention="flash-attn-2", batch_kind="padded"))


def test_a_model_without_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "openai-gpt", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 64}))
    with pytest.raises(UsageError, match="transformers has no flash-attn 2 for OpenAIGPTLMHeadModel"):
        program(str(path))


@pytest.mark.parametrize(
    ("options", "message"), [({"target": "cpu"}, "for cuda"), ({"gpu": "7.5"}, "needs compute capability 8.0")]
)
def test_recipes_that_cannot_be_meant(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe(attention="flash-attn-2", **options)  # type: ignore[arg-type]
