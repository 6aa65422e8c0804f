"""What memir predicts for a published run: the step traced, then played through the allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from memir.allocator.loading import typical
from memir.allocator.replay import simulate
from memir.allocator.schedule import Kept, schedule
from memir.allocator.simulator import Allocator
from memir.analysis.inventory import round_size
from memir.api import TracedProgram, program_of
from memir.cuda.context import cublas_workspace
from memir.ir.core import Kind
from memir.ir.declarations import member_count
from memir.recipe import Recipe

THREADS = 2  # the main thread and autograd's


@dataclass(frozen=True, slots=True)
class Predicted:
    """Bytes. `phases` are the allocated peaks of forward, backward, optimizer in the steady state; `steady` between steps."""

    parameters: int
    resident: int  # before the first step: parameters, buffers, the batch, each rounded; blocks where the load is played
    least: int  # where the load is played: the least and the most of it in other courses of the load
    most: int
    states: int
    workspaces: int  # cuBLAS's
    phases: dict[str, int]
    peak: int
    reserved: int
    place: str

    @property
    def steady(self) -> int:
        """Between steps: what is resident, the optimizer's state, cuBLAS's workspaces."""
        return self.resident + self.states + self.workspaces


def _never(*_: object, **__: object) -> bool:
    return False


@contextmanager
def expanded_groups() -> Iterator[None]:
    """Grouped keys and values are expanded before scaled_dot_product_attention, as the T4 runs did it."""
    from transformers.integrations import sdpa_attention

    # no Mock as the new function: it would keep what it is called with, the keys
    with mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", new=_never):
        yield


def predict(traced: TracedProgram, gpu: str) -> Predicted:
    """The figures of a traced step on a GPU of that compute capability."""
    program, env = traced.program, traced.env
    workspace = cublas_workspace(gpu)
    result = simulate(program, env, kept=_kept(gpu))
    sizes = {s.name: round_size(s.nbytes.evaluate(env)) for s in program.storages if s.live_in and s.device == "gpu"}
    members = _members(traced)
    by_kind = {
        kind: sum(sizes[s.name] * members[s.name] for s in program.storages if s.name in sizes and s.kind == kind)
        for kind in Kind
    }
    phases = {phase.phase: phase.allocated for phase in result.phases}
    at = max(phases, key=phases.__getitem__)
    return Predicted(
        traced.subject.num_parameters,
        by_kind[Kind.PARAMETER] + by_kind[Kind.BUFFER] + by_kind[Kind.INPUT],
        0,
        0,
        by_kind[Kind.OPTIMIZER_STATE],
        THREADS * workspace,
        phases,
        phases[at],
        result.reserved_peak,
        at,
    )


def predict_loaded(traced: TracedProgram, gpu: str, measured_step: int) -> Predicted:
    """The same, after the load of the weights was played (memir/allocator/loading.py), or `.cuda()` where none is packed.

    `peak` and `reserved` are those of one step, counted from 1, and the phases those of the next, as the T4's runs measured
    them; the batch is not there yet when `resident` is read.
    """
    program, env = traced.program, traced.env
    plan = schedule(program, env)
    before = [name for name in plan.before if plan.storages[name].kind is not Kind.INPUT]
    packed = any(name.partition("[")[0].endswith(".absmax") for name in before)
    load, least, most = typical(plan) if packed else (None, 0, 0)
    allocator = Allocator(record=False)
    placed = load(plan, allocator) if load else {}
    loaded = allocator.allocated
    for name in before:
        if name not in placed:
            allocator.malloc(plan.sizes[name])
    step, after = (
        simulate(program, env, kept=_kept(gpu), load=load, steps=steps) for steps in (measured_step, measured_step + 1)
    )
    plain = predict(traced, gpu)
    peaks = {phase.phase: phase.allocated for phase in step.phases}
    at = max(peaks, key=peaks.__getitem__)
    return replace(
        plain,
        resident=allocator.allocated,
        least=allocator.allocated + least - loaded if packed else 0,
        most=allocator.allocated + most - loaded if packed else 0,
        phases={phase.phase: phase.allocated for phase in after.phases},
        peak=peaks[at],
        reserved=step.reserved_peak,
        place=at,
    )


def _kept(gpu: str) -> list[Kept]:
    return [Kept(cublas_workspace(gpu), phase) for phase in ("forward", "backward")]


def _members(traced: TracedProgram) -> dict[str, int]:
    """How many storages each declaration stands for."""
    return {s.name: member_count(s.name).evaluate(traced.env) for s in traced.program.storages}


def step(preset: str, recipe: Recipe, batch: int, seq: int, sets: dict[str, str]) -> TracedProgram:
    """The step traced, or read from memir's cache."""
    return program_of(preset, recipe, batch=batch, seq=seq, sets=sets, cache=False)
