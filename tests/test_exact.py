"""One rank traced through PyTorch's FSDP2 and DTensor on fake tensors: sizes added up by hand, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from memir.analysis.liveness import timeline
from memir.errors import UsageError
from memir.frontend.exact import trace_rank
from memir.frontend.load import load_target
from memir.frontend.loaded import LoadedModel
from memir.frontend.parallel import parse_methods
from memir.ir.core import Kind, Program
from memir.ir.verify import verify
from memir.recipe import Recipe

RECIPE = Recipe(target="cpu", dtype="f32")
WIDTH, LAYERS, VOCABULARY, KV, HIDDEN = 256, 2, 1024, 128, 768  # examples/llama.py:small


def load() -> LoadedModel:
    return load_target("examples/llama.py:small", recipe=RECIPE)


def traced(methods: str, rank: int = 0) -> Program:
    program = trace_rank(load, RECIPE, parse_methods(methods), 2, 32, rank).program
    verify(program)
    return program


def held(program: Program, kind: Kind) -> int:
    """Bytes of a kind that live across steps."""
    return sum(s.nbytes.evaluate({}) for s in program.storages if s.kind is kind and s.live_in)


def test_fsdp_on_64_ranks_holds_a_64th_and_gathers_a_layer() -> None:
    before = torch.UntypedStorage.resize_, DeviceMesh.__init__, ShardingPropagator._propagate_tensor_meta_non_cached
    program = traced("fsdp{degree=64}", rank=63)
    layer = WIDTH * (2 * WIDTH + 2 * KV + 3 * HIDDEN) + 2 * WIDTH
    parameters = 2 * VOCABULARY * WIDTH + LAYERS * layer + WIDTH
    assert held(program, Kind.PARAMETER) == 4 * parameters // 64
    steps = 4 * (2 + 1 + 9 * LAYERS)
    assert held(program, Kind.OPTIMIZER_STATE) == 2 * 4 * parameters // 64 + steps
    assert program.mesh[0][0] == "shard"
    gathered = [s.nbytes.evaluate({}) for s in program.storages if s.kind is Kind.COLLECTIVE]
    assert gathered.count(4 * layer) >= 2 * LAYERS  # in forward and in backward
    after = torch.UntypedStorage.resize_, DeviceMesh.__init__, ShardingPropagator._propagate_tensor_meta_non_cached
    assert before == after
    assert not dist.is_initialized()


def test_tensor_parallelism_halves_matrices_and_keeps_norms() -> None:
    program = traced("tensor-parallel{degree=2 sequence loss}")
    matrices = 2 * VOCABULARY * WIDTH + LAYERS * WIDTH * (2 * WIDTH + 2 * KV + 3 * HIDDEN)
    norms = WIDTH * (2 * LAYERS + 1)
    assert held(program, Kind.PARAMETER) == 4 * (matrices // 2 + norms)
    numbers = timeline(program).evaluate({})
    assert numbers.start == numbers.after[-1]


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(UsageError, match="data-parallel: PyTorch's own code cannot be traced"):
        traced("data-parallel{degree=2}")
    with pytest.raises(UsageError, match="there is no rank 2 of 2"):
        traced("fsdp{degree=2}", rank=2)
