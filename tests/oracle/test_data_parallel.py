"""The data-parallel pass against DistributedDataParallel on two CPU ranks: start, peak and end of a step, in bytes."""

from __future__ import annotations

from typing import Any

import pytest

from memir.analysis.liveness import timeline
from memir.api import trace
from memir.pipeline import Pipeline
from memir.recipe import Lora, Recipe
from memir.runtime.ranks import real_ranks

SMALL = {"num_hidden_layers": "3", "hidden_size": "128", "intermediate_size": "344", "vocab_size": "512"}
HEADS = {"num_attention_heads": "4", "num_key_value_heads": "2"}
TARGETS = {
    "gpt": ("examples/gpt.py", {"n_layer": "3", "n_embd": "128", "n_head": "4", "vocab_size": "512"}),
    "gpt2": ("gpt2", {"n_layer": "3", "n_embd": "128", "n_head": "4", "vocab_size": "512"}),
    "llama": ("llama-3-8b", SMALL | HEADS),
    "qwen2": ("qwen2-0.5b", SMALL | HEADS),
}
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gpt", "", {}),
    ("llama", "gradient-as-bucket-view", {"checkpoint": "full", "clip": 1.0}),
    ("gpt2", "gradient-as-bucket-view", {"accumulate": 3, "zero_grad": "first"}),
    ("qwen2", "static-graph", {"amp": "bf16"}),
    ("gpt2", "hook=fp16 bucket-cap-mb=0.25 gradient-as-bucket-view", {"optimizer": "sgd"}),
    ("llama", "hook=bf16", {"lora": Lora(r=4)}),
)
HOST = 4 * 38  # the map of used parameters on the host, which is the same memory here
SCALARS = 256  # bytes: numbers that operators make tensors of (12 at each copy into a bucket)


@pytest.mark.parametrize(("target", "options", "recipe"), CASES, ids=[f"{t}-{o or 'plain'}" for t, o, _ in CASES])
def test_bytes_are_those_of_ddp(target: str, options: str, recipe: dict[str, Any]) -> None:
    where, sets = TARGETS[target]
    made = Recipe(**{"target": "cpu", "dtype": "f32"} | recipe)
    ranks = real_ranks(where, made, 2, 64, sets, f"data-parallel{{degree=2 {options}}}")
    passes = Pipeline.parse(f"data-parallel{{degree=2 no-sync=false {options}}}")  # the loop calls no no_sync()
    program = passes.run(trace(where, made, sets=sets, batch=2, seq=64).program)
    found = timeline(program).evaluate({"B": 2, "S": 64})
    missed = HOST if "static" in options else 0
    for rank in ranks:
        assert (found.start + missed, found.after[-1] + missed) == (rank.at_start, rank.at_end)
        assert abs(found.peak + missed - rank.peak) <= SCALARS


def test_frozen_parameters_are_in_no_bucket() -> None:
    """requires_grad=False on a prefix: DistributedDataParallel has no buckets for it."""
    made = Recipe(target="cpu", dtype="f32")
    method = "data-parallel{degree=2 gradient-as-bucket-view}"
    ranks = real_ranks("tests/cases/frozen_llama.py:frozen", made, 2, 64, {"cut": "2"}, method)
    sets = {"dim": "128", "n_layers": "5", "n_heads": "4", "n_kv_heads": "2", "hidden_dim": "344", "vocab_size": "1000"}
    passes = Pipeline.parse("freeze{cut=2},data-parallel{degree=2 no-sync=false gradient-as-bucket-view}")
    program = passes.run(trace("examples/llama.py", made, sets=sets, batch=2, seq=64).program)
    found = timeline(program).evaluate({"B": 2, "S": 64})
    for rank in ranks:
        assert (found.start, found.after[-1]) == (rank.at_start, rank.at_end)
        assert abs(found.peak - rank.peak) <= SCALARS
