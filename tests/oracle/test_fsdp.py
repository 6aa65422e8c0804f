"""The pass `fsdp` against PyTorch's own fully_shard on real CPU ranks: bytes at start, peak and end of every rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from memir.analysis.liveness import timeline
from memir.api import program_of
from memir.passes.fsdp import Fsdp
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


CASES = {
    "llama": Case("examples/llama.py", LLAMA, "fsdp{degree=2 reshard=default}", "fsdp{degree=2}"),
    "padded": Case("examples/llama.py", ODD, "fsdp{degree=4 reshard=default}", "fsdp{degree=4}"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_takes_what_fully_shard_takes(name: str) -> None:
    case = CASES[name]
    real = real_ranks(case.target, case.recipe, BATCH, SEQ, case.sets, case.method)
    recipe = replace(case.recipe, **case.traced)
    traced = program_of(case.target, recipe, sets=case.sets, batch=BATCH, seq=SEQ)
    env = {**traced.dims, "B": BATCH, "S": SEQ}
    (one,) = Pipeline.parse(case.passes).passes
    assert isinstance(one, Fsdp)
    for rank, measured in enumerate(real):
        program = replace(one, rank=rank).run(traced.program)
        numbers = timeline(program).evaluate({name: env[name] for name in program.dims})
        found = (numbers.start, numbers.peak, numbers.after[-1])
        assert found == (measured.at_start, measured.peak, measured.at_end)
