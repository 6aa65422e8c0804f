"""expert-parallel against transformers' own on real processes: each rank's bytes at start, peak and end."""

from __future__ import annotations

import pytest

import memir
from memir.analysis.liveness import timeline
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Program
from memir.ir.verify import verify
from memir.passes.data_parallel import DataParallel
from memir.passes.expert_parallel import ExpertParallel
from memir.recipe import Recipe
from memir.runtime.ranks import real_ranks

MIXTRAL = (
    "mixtral-8x7b",
    {
        "num_hidden_layers": "2",
        "hidden_size": "64",
        "intermediate_size": "96",
        "num_attention_heads": "4",
        "num_key_value_heads": "4",
        "head_dim": "16",
        "vocab_size": "256",
        "num_local_experts": "4",
    },
)
BATCH, SEQ = 2, 64


def step(recipe: Recipe) -> Program:
    return memir.trace(MIXTRAL[0], recipe, batch=BATCH, seq=SEQ, sets=MIXTRAL[1]).program


def test_every_rank() -> None:
    recipe = Recipe(target="cpu", dtype="bf16", checkpoint="full")  # routing weights in fp32, experts run twice
    program = ExpertParallel(degree=2).run(step(recipe))
    verify(program)
    numbers = timeline(program).evaluate({"B": BATCH, "S": SEQ})
    for measured in real_ranks(MIXTRAL[0], recipe, BATCH, SEQ, MIXTRAL[1], "expert-parallel{degree=2}"):
        assert (numbers.start, numbers.peak, numbers.after[-1]) == (measured.at_start, measured.peak, measured.at_end)


def test_load_degrees_and_sums() -> None:
    program = step(Recipe(target="cpu", dtype="f32"))
    assert ExpertParallel().run(program) is program
    rank = ExpertParallel(degree=4).run(program)
    for kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE, Kind.GRADIENT):
        whole, own = held(program, kind, experts=True), held(rank, kind, experts=True)
        assert whole == 4 * own or kind is Kind.OPTIMIZER_STATE  # but for steps, a number each
        assert held(program, kind, experts=False) == held(rank, kind, experts=False)
    peaks = []
    for load in (1, 2, 4):
        loaded = ExpertParallel(degree=4, load=load).run(program)
        verify(loaded)
        peaks.append(timeline(loaded).evaluate({"B": BATCH, "S": SEQ}).peak)
    assert peaks == sorted(set(peaks))
    with pytest.raises(UsageError, match="4 experts do not divide by 3"):
        ExpertParallel(degree=3).run(program)
    with pytest.raises(UsageError, match="load 5 of 4"):
        ExpertParallel(degree=4, load=5).run(program)
    with pytest.raises(InconclusiveError, match="over divided experts"):
        DataParallel(degree=2).run(rank)


def held(program: Program, kind: Kind, *, experts: bool) -> int:
    return sum(s.nbytes.constant for s in program.storages if s.kind is kind and (".experts." in s.name) is experts)
