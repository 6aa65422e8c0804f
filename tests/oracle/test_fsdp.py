"""The passes `fsdp` and `fsdp1` against PyTorch's own on real CPU ranks: bytes at start, peak and end of every rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from memir.analysis.liveness import timeline
from memir.api import program_of
from memir.ir.unroll import unroll
from memir.passes.fsdp import Fsdp
from memir.passes.fsdp1 import Fsdp1
from memir.pipeline import Pipeline
from memir.recipe import Recipe
from memir.runtime.ranks import real_ranks

LLAMA = {"dim": "128", "n_layers": "5", "n_heads": "4", "n_kv_heads": "2", "hidden_dim": "344", "vocab_size": "1000"}
ODD = {**LLAMA, "dim": "60", "n_layers": "4", "n_heads": "5", "n_kv_heads": "1", "hidden_dim": "177", "vocab_size": "1001"}
BATCH, SEQ = 2, 64


@dataclass(frozen=True)
class Case:
    """A step, the text of PyTorch's method and of memir's pass, and what the trace has that the real step has not."""

    target: str
    sets: dict[str, str]
    method: str
    passes: str
    recipe: Recipe = field(default_factory=lambda: Recipe(target="cpu", dtype="f32"))
    traced: dict[str, str] = field(default_factory=dict)
    inner: int = 1  # ranks of the axes within FSDP's


MIXED = {"dtype": "bf16"}
CLIPPED = Recipe(target="cpu", dtype="f32", clip=1.0)
QWEN = {
    "num_hidden_layers": "6",
    "hidden_size": "128",
    "intermediate_size": "344",
    "num_attention_heads": "4",
    "num_key_value_heads": "2",
    "vocab_size": "1000",
}
CASES = {
    "llama": Case("examples/llama.py", LLAMA, "fsdp{degree=2 reshard=default}", "fsdp{degree=2}"),
    "padded": Case("examples/llama.py", ODD, "fsdp{degree=4 reshard=default}", "fsdp{degree=4}"),
    "mixed": Case(
        "qwen2-0.5b",
        QWEN,
        "fsdp{degree=2 reshard=default param-dtype=bf16 reduce-dtype=f32}",
        "fsdp{degree=2 param-dtype=bf16 reduce-dtype=f32}",
        CLIPPED,
        MIXED,
    ),
    "hybrid": Case(
        "examples/gpt.py",
        {"n_layer": "5", "n_embd": "64", "n_head": "4", "vocab_size": "1000"},
        "fsdp{degree=2 replicate=2 reshard=true forward-prefetch=1 backward-prefetch=2}",
        "fsdp{degree=2 replicate=2 reshard=true forward-prefetch=1 backward-prefetch=2}",
    ),
    "with-tensor": Case(
        "llama-3-8b",
        QWEN,
        "tensor-parallel{degree=2 sequence loss},fsdp{degree=2 reshard=default}",
        "tensor-parallel{degree=2 sequence loss},fsdp{degree=2}",
        replace(CLIPPED, checkpoint="full"),
        inner=2,
    ),
    "flat": Case("examples/llama.py", ODD, "fsdp1{degree=2}", "fsdp1{degree=2 cpu}"),
    "flat-mixed": Case(
        "qwen2-0.5b",
        QWEN,
        "fsdp1{degree=2 param-dtype=bf16 reduce-dtype=bf16 strategy=grad-op}",
        "fsdp1{degree=2 param-dtype=bf16 reduce-dtype=bf16 strategy=grad-op cpu}",
        CLIPPED,
        MIXED,
    ),
}
SCALARS = 64  # bytes: 8 a Python number that an operator is given, which the trace has not


@pytest.mark.parametrize("name", CASES)
def test_every_rank_takes_what_fully_shard_takes(name: str) -> None:
    case = CASES[name]
    real = real_ranks(case.target, case.recipe, BATCH, SEQ, case.sets, case.method)
    recipe = replace(case.recipe, **case.traced)
    traced = program_of(case.target, recipe, sets=case.sets, batch=BATCH, seq=SEQ)
    env = {**traced.dims, "B": BATCH, "S": SEQ}
    *others, one = Pipeline.parse(case.passes).passes
    assert isinstance(one, Fsdp | Fsdp1)
    parallel = Pipeline(tuple(others)).run(traced.program)
    for rank, measured in enumerate(real):
        program = replace(one, rank=rank // case.inner).run(parallel)
        numbers = timeline(program).evaluate({name: env[name] for name in program.dims})
        assert (numbers.start, numbers.after[-1]) == (measured.at_start, measured.at_end)
        assert abs(numbers.peak - measured.peak) <= SCALARS


@pytest.mark.parametrize(("cut", "reshard"), [(2, "default"), (4, "false")])
def test_frozen_layers_are_gathered_and_not_reduced(cut: int, reshard: str) -> None:
    """requires_grad=False on a prefix, as a script sets it: those layers have neither gradients nor states on any rank."""
    recipe = Recipe(target="cpu", dtype="f32")
    frozen = "tests/cases/frozen_llama.py:frozen"
    real = real_ranks(frozen, recipe, BATCH, SEQ, {"cut": str(cut)}, f"fsdp{{degree=2 reshard={reshard}}}")
    traced = program_of("examples/llama.py", recipe, sets=LLAMA, batch=BATCH, seq=SEQ)
    passes = Pipeline.parse(f"freeze{{cut={cut}}},fsdp{{degree=2 reshard={reshard}}}")
    near_end = cut > 2  # there the layers are written out
    whole = unroll(traced.program, traced.dims) if near_end else traced.program
    program = passes.run(whole) if near_end else unroll(passes.run(whole), traced.dims)
    numbers = timeline(program).evaluate({"B": BATCH, "S": SEQ})
    for measured in real:
        assert (numbers.start, numbers.after[-1]) == (measured.at_start, measured.at_end)
        assert abs(numbers.peak - measured.peak) <= SCALARS
    collectives = {word: {op.path for _, op in program.ops() if word in op.opcode} for word in ("allgather", "reduce_scatter")}
    assert collectives == {
        "allgather": {"", *(f"layers.{k}" for k in range(5))},
        "reduce_scatter": {"", *(f"layers.{k}" for k in range(cut, 5))},
    }
