"""The derived tensor-parallel plan against the plans that transformers' configs carry (`base_model_tp_plan`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

import memir
from memir.parallel.tensor.chains import plan_of
from memir.parallel.tensor.walk import Graph
from memir.recipe import Recipe
from memir.rewrite.flow import Flow

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
WORDS = {"colwise": "column", "rowwise": "row"}  # transformers/integrations/tensor_parallel.py


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox"])
def test_plan_is_transformers_own(kind: str, tmp_path: Path) -> None:
    config = {**SMALL, "model_type": kind}
    if kind not in ("phi", "gpt_neox"):
        config |= {"num_key_value_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = AutoConfig.from_pretrained(tmp_path).base_model_tp_plan
    traced = memir.trace(str(tmp_path), Recipe(target="cpu", dtype="f32", optimizer="none"), batch=2, seq=24)
    mine = plan_of(Graph(Flow(traced.program))).text().splitlines()
    found: dict[str, set[str]] = {}
    for line in mine:
        name, role = line.split()
        if role != "vocabulary":
            found.setdefault(re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight").split(".", 1)[1], set()).add(role)
    expected = {name: {WORDS[style]} for name, style in theirs.items() if style in WORDS}
    assert found == expected
    assert sum(line.endswith("vocabulary") for line in mine) == (1 if traced.program.name.startswith("Gemma") else 2)
