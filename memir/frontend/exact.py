"""One rank's step under FSDP2 and DTensor, traced through PyTorch's own code on fake tensors and a fake process group.

Any number of ranks, in one process: `fully_shard` and `parallelize_module` are applied to the fake model, and what they do on
one rank is recorded operator by operator. Batch and sequence are numbers, all layers are traced. It is the last word on what a
pass says. DistributedDataParallel's constructor refuses fake tensors.

Technique: torch/testing/_internal/distributed/fake_pg.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from memir.errors import InconclusiveError, UsageError
from memir.frontend.accumulate import accumulate_in_place
from memir.frontend.answers import Answers
from memir.frontend.cuda import HANDLERS
from memir.frontend.exact_record import COLLECTIVE_HANDLERS, RankRecorder, RankResidents, ranks_seen
from memir.frontend.fake import Extent, fake_batch, make_mode, move_to_fake
from memir.frontend.loaded import LoadedModel
from memir.frontend.loop import Step, batch_spec
from memir.frontend.lower import lower
from memir.frontend.optimizers import make_optimizer, resolved_impl
from memir.frontend.origin import ModuleStack
from memir.frontend.parallel.fsdp import Fsdp
from memir.frontend.parallel.method import Method, Model, apply_methods, around_step, make_mesh, world_size
from memir.frontend.parallel.tensor import TensorParallel
from memir.frontend.patches import export_left_out
from memir.frontend.prepare import prepare
from memir.frontend.quantize import num_elements
from memir.frontend.quiet import quiet
from memir.frontend.saved import saved_storages
from memir.frontend.symbols import SizeReader
from memir.frontend.trace import Progress, Traced, live_bytes, recording, surroundings
from memir.ir.core import Kind, Program
from memir.ir.size import Size
from memir.recipe import Recipe

_MAX_STEPS = 4  # the first makes the optimizer's state; a step that is not steady after so many grows without end
_COLLECTIVES = ("c10d.", "_c10d_functional.")


def trace_rank(
    load: Callable[[], LoadedModel],
    recipe: Recipe,
    methods: Sequence[Method],
    batch: int,
    seq: int,
    rank: int = 0,
    progress: Progress = lambda text: None,
) -> Traced:
    """The steady-state step of one rank; its program holds at B=batch and S=seq only.

    UsageError: a method that cannot be traced on fake tensors, a rank that the mesh has not, a process group that is there
    already. InconclusiveError: the model's code cannot be followed, or the step is not steady.
    """
    for method in methods:
        if not isinstance(method, Fsdp | TensorParallel):
            raise UsageError(
                f"{method.name}: PyTorch's own code cannot be traced without tensors",
                hint="fsdp and tensor-parallel can; others run for real:  python -m benchmarks.distributed one",
            )
    with quiet(), fake_ranks(world_size(methods), rank):
        return _trace(load, recipe, methods, make_mesh(methods), batch, seq, progress)


@contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Within, this process is one rank of a fake process group whose collectives do nothing."""
    if not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank} of {world}")
    if dist.is_initialized():
        raise UsageError("a process group is initialized here already, and a trace of ranks needs one of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _trace(
    load: Callable[[], LoadedModel],
    recipe: Recipe,
    methods: Sequence[Method],
    mesh: DeviceMesh,
    batch: int,
    seq: int,
    progress: Progress,
) -> Traced:
    progress("loading the model")
    loaded = load()
    module = prepare(loaded, recipe)
    counts = num_elements(module)
    fake = make_mode()
    move_to_fake(module, fake)
    extents = Extent("B", batch, symbolic=False), Extent("S", seq, symbolic=False)
    with export_left_out():
        tensors = fake_batch(tuple(dict.fromkeys(batch_spec(loaded.call))), *extents, fake)
    resolved_impl(recipe)
    handlers = {**COLLECTIVE_HANDLERS, **(HANDLERS if recipe.target == "cuda" else {})}
    answers = Answers(tensors, loaded, recipe, handlers)
    modules = ModuleStack(module)
    recorder = RankRecorder(SizeReader(fake), modules, answers)
    with surroundings(loaded, recipe, fake, modules, *extents), ranks_seen(recorder):
        recorder.silent = True
        with recorder:
            module = apply_methods(methods, Model(loaded, module, recipe), mesh)
            optimizer = make_optimizer(module, recipe)
        gc.collect()

        def on_loss(loss: torch.Tensor) -> None:
            recorder.saved.update(saved_storages(loss, recorder))

        step = Step(module, loaded.call, recipe, optimizer, recorder.on_phase, recorder.on_event, on_loss)
        host_scalars = recipe.target == "cuda" and resolved_impl(recipe) in ("foreach", "for-loop")
        residents = RankResidents(module, optimizer, tensors, recorder, host_scalars=host_scalars)
        residents.held = step.held
        recorder.entered = residents.note_gradients
        for number in range(_MAX_STEPS):
            progress(f"tracing step {number + 1}")
            recorder.silent = False
            recorder.reset()
            residents.register()
            answers.attach(recorder)
            before = live_bytes(recorder)
            with recording(recorder, recipe.target), around_step(methods):
                step(tensors)
            residents.note_gradients()
            recorder.silent = True
            gc.collect()
            if live_bytes(recorder) == before:
                break
        else:
            raise InconclusiveError(
                f"the step is not steady: {before} bytes are alive before the last traced one, {live_bytes(recorder)} after it"
            )
        recorder.closed = True
    accumulate_in_place(recorder)
    domain = (f"B == {batch}", f"S == {seq}")
    program = _named(lower(recorder, None, loaded.name, domain, recipe), methods)
    return Traced(program, recorder.graph, "exact", *counts, [*loaded.assumptions, *answers.assumptions])


def _named(program: Program, methods: Sequence[Method]) -> Program:
    """With the mesh, and the buffers of collectives as such."""
    ops = [op for _, op in program.ops()]
    places = {value.name: value.storage for value in (*program.values, *(r for op in ops for r in op.results))}
    names = [n for op in ops if op.opcode.startswith(_COLLECTIVES) for n in (*op.operands, *(r.name for r in op.results))]
    buffers = {places[name] for name in names}
    storages = tuple(
        replace(s, kind=Kind.COLLECTIVE) if s.name in buffers and s.kind is Kind.TEMPORARY else s for s in program.storages
    )
    mesh = tuple((axis.name, Size.of(axis.degree)) for method in methods for axis in method.axes())
    return replace(program, storages=storages, mesh=mesh)
