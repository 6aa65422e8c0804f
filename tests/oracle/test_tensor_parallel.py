"""tensor-parallel against PyTorch's parallelize_module on real CPU ranks: the same bytes at the step's start, peak and end."""

from __future__ import annotations

import pytest

import memir
from memir.passes.tensor_parallel import TensorParallel
from memir.pipeline import Pipeline
from memir.recipe import Recipe
from memir.runtime.ranks import real_ranks

HF = {
    "num_hidden_layers": "2",
    "hidden_size": "128",
    "intermediate_size": "256",
    "num_attention_heads": "8",
    "num_key_value_heads": "4",
    "vocab_size": "2000",
}
LLAMA = ("examples/llama.py:small", {"n_layers": "2", "dim": "128"})


@pytest.mark.parametrize(
    ("model", "checkpoint", "dtype", "method"),
    [
        (LLAMA, "none", "f32", TensorParallel(4)),
        (LLAMA, "full", "bf16", TensorParallel(2, sequence=True)),
        (("mistral-7b-v0.1", HF), "none", "f32", TensorParallel(2, sequence=True, loss=True)),
        (("qwen2.5-7b", HF), "full", "f32", TensorParallel(2, loss=True)),
        (("tests/cases/apart.py", {}), "none", "bf16", TensorParallel(2)),
    ],
    ids=["llama-4", "llama-checkpoint-bf16-sequence", "mistral-sequence-loss", "qwen2-checkpoint-loss", "plain-code"],
)
def test_each_rank(model: tuple[str, dict[str, str]], checkpoint: str, dtype: str, method: TensorParallel) -> None:
    """Scalars that Python makes in a loss (8 bytes each) are in the measured bytes only."""
    target, sets = model
    impl = "foreach" if method.sequence else "for-loop"  # PyTorch's lists refuse DTensors beside plain norms
    recipe = Recipe(target="cpu", dtype=dtype, checkpoint=checkpoint, optimizer_impl=impl)
    options = " ".join(k if v is True else f"{k}={v}" for k in method.__slots__ if (v := getattr(method, k)))
    program = method.run(memir.trace(target, recipe, sets=sets, batch=2, seq=64).program)
    at = {"B": 2, "S": 64}
    resident = sum(s.nbytes.evaluate(at) for s in program.storages if s.live_in)
    peak = memir.peak(program).evaluate(at)[0]
    for rank in real_ranks(target, recipe, 2, 64, sets, f"tensor-parallel{{{options}}}"):
        assert (rank.at_start, rank.at_end) == (resident, resident)
        assert abs(rank.peak - peak) <= 64


def test_with_fsdp() -> None:
    """FSDP over two pairs of tensor-parallel ranks."""
    target, sets = LLAMA
    recipe = Recipe(target="cpu", dtype="f32")
    program = memir.trace(target, recipe, sets=sets, batch=2, seq=64).program
    passes = Pipeline.parse("tensor-parallel{degree=2 sequence placed-gradients},fsdp{degree=2}")
    peak = memir.peak(passes.run(program)).evaluate({"B": 2, "S": 64})[0]
    for rank in real_ranks(target, recipe, 2, 64, sets, "fsdp{degree=2},tensor-parallel{degree=2 sequence}"):
        assert abs(rank.peak - peak) <= 64
