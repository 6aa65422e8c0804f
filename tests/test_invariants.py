"""Figures that published measurements agree on, from programs of small models: bytes a parameter, bytes a logit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memir
from memir.ir.core import Kind
from memir.recipe import Recipe

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "config.json")


def test_bytes_a_parameter_of_full_fine_tuning(llama: str) -> None:
    """Published: 72,434,837,504 bytes at the peak and 43,467,876,352 between steps for 7,241,732,096 parameters in bf16.

    10.00 and 6.00 (fms-acceleration, a100_80gb.csv): weights, gradients, two states, one temporary of foreach AdamW.
    """
    report = memir.analyze(llama, Recipe(), batch=2, seq=8, cache=False)
    parameters = report.subject.num_parameters
    assert f"{report.peak.requested / parameters:.2f}" == "10.00"
    assert f"{report.steady.requested / parameters:.2f}" == "6.00"


@pytest.mark.parametrize(("dtype", "amp"), [("f32", "none"), ("bf16", "none"), ("f32", "bf16")])
def test_one_fp32_logits_tensor_is_4_bsv(llama: str, dtype: str, amp: str) -> None:
    program = memir.trace(llama, Recipe(dtype=dtype, amp=amp), batch=2, seq=32).program
    sizes = [str(s.nbytes) for s in program.storages if s.kind in (Kind.ACTIVATION, Kind.TEMPORARY)]
    assert f"{4 * 512}*B*S" in sizes
