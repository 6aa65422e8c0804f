"""One steady-state training step of a loaded model, traced on fake tensors, and lowered to a Program.

Steps of the trace: the model is moved to fake tensors; the forward runs once without gradients (it shows when Python lets go of
what autograd keeps); the optimizer's state is made; then whole steps are recorded until one ends as it began.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher

from memir.errors import InconclusiveError
from memir.frontend import flash_attn
from memir.frontend.accumulate import accumulate_in_place
from memir.frontend.amp import cuda_autocast
from memir.frontend.answers import Answers, Handler
from memir.frontend.attempts import trace_symbolically
from memir.frontend.checkpoints import checkpointed_inputs, reentrant_gradients
from memir.frontend.composites import cpp_composites
from memir.frontend.cuda import HANDLERS
from memir.frontend.domains import domain_of
from memir.frontend.failures import explained
from memir.frontend.fake import Extent, Fake, fake_batch, make_mode, move_to_fake
from memir.frontend.families import FoldError
from memir.frontend.folding import is_deep, trace_folded
from memir.frontend.functions import target_functions
from memir.frontend.load_build import CudaMeans
from memir.frontend.load_eager import eager_only
from memir.frontend.load_import import user_scope
from memir.frontend.loaded import LoadedModel
from memir.frontend.loop import Step, batch_spec
from memir.frontend.lower import lower
from memir.frontend.microbatches import TRACED, collapsed
from memir.frontend.optimizers import make_optimizer, optimizer_notes, resolved_impl
from memir.frontend.origin import ModuleStack
from memir.frontend.patches import export_left_out, generator_states, real_branches, remembered_sizes
from memir.frontend.prepare import prepare, without_effect
from memir.frontend.quantize import num_elements
from memir.frontend.quiet import quiet
from memir.frontend.record import Recorder
from memir.frontend.residents import Residents
from memir.frontend.saved import saved_storages
from memir.frontend.symbols import LostSymbolError, SizeReader, specialized
from memir.frontend.trainer import check_loss, with_all_batches
from memir.frontend.uncounted import uncounted
from memir.garbage import uncollected
from memir.ir.core import Program
from memir.ir.opset import without_rule
from memir.recipe import Recipe

_MAX_STEPS = 4  # a loop that is not steady after so many steps grows without end


@dataclass(slots=True)
class Traced:
    """A traced step. `method` is "symbolic" (B and S stayed symbols) or "fit" (concrete traces, polynomials verified)."""

    program: Program
    fx_graph: fx.Graph
    method: str
    num_parameters: int
    num_trainable: int
    assumptions: list[str] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)  # what is not proven beyond the asked point
    general: Program | None = None  # of the neighbouring points, where `program` holds at the asked one only
    symbols: dict[str, str] = field(default_factory=dict)  # PyTorch's names of symbols in the graph -> "B", "S"
    dims: dict[str, int] = field(default_factory=dict)  # symbols that the target gives a value: "L" -> 32, its layers

    @property
    def graph(self) -> fx.GraphModule:
        """The step as a torch.fx.GraphModule of ATen operators; nodes carry phase, path, source and layer in `meta`."""
        return fx.GraphModule(nn.Module(), self.fx_graph, class_name="Step")


Progress = Callable[[str], None]


def trace_once(
    load: Callable[[], LoadedModel],
    recipe: Recipe,
    batch: Extent,
    seq: Extent,
    progress: Progress = lambda text: None,
    *,
    lifetimes: bool = True,
) -> tuple[Traced, Fake]:
    """One trace at the given extents. Raises InconclusiveError where the model's code cannot be followed.

    Without `lifetimes` the program has no drops: the forward without gradients, which shows them, is left out.
    """
    progress("loading the model")
    loaded = load()
    if recipe.loop == "trainer":
        check_loss(loaded)
    module = prepare(loaded, recipe)
    fake = make_mode(cached=not (batch.symbolic or seq.symbolic))
    move_to_fake(module, fake)
    with export_left_out():
        tensors = fake_batch(tuple(dict.fromkeys(batch_spec(loaded.call))), batch, seq, fake)
    resolved_impl(recipe)  # what is wrong with it is told before the trace
    handlers: dict[Any, Handler] = HANDLERS if recipe.target == "cuda" else {}
    answers = Answers(tensors, loaded, recipe, handlers)
    tracing = _Tracing(module, loaded, recipe, tensors, SizeReader(fake), ModuleStack(module), answers)
    with surroundings(loaded, recipe, fake, tracing.modules, batch, seq):
        released = None
        if recipe.mode == "train" and lifetimes:
            progress("tracing the forward without gradients")
            released = tracing.forward()
            if specialized(fake):
                raise LostSymbolError(fake)
        progress("tracing the step")
        recorder = tracing.steady_step()
    answers.assumptions += without_effect(loaded, recipe) + optimizer_notes(recipe)
    accumulate_in_place(recorder)
    program = lower(recorder, released, loaded.name, domain_of(fake), recipe)
    traced = Traced(
        program,
        recorder.graph,
        "symbolic",
        *num_elements(module),
        [*loaded.assumptions, *answers.assumptions],
        symbols={str(symbol): name for symbol, name in fake.names.items()},
    )
    return traced, fake


@contextmanager
def surroundings(
    loaded: LoadedModel, recipe: Recipe, fake: Fake, modules: ModuleStack, batch: Extent, seq: Extent
) -> Iterator[None]:
    """Within, the model's code runs on fake tensors as it would run for real on the recipe's target."""
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(eager_only(loaded.assumptions))
        stack.enter_context(user_scope(loaded.module))
        if not loaded.is_library:  # transformers' models name no device
            stack.enter_context(CudaMeans("cpu"))
        stack.enter_context(real_branches())
        if loaded.is_hf and recipe.attention == flash_attn.NAME:
            stack.enter_context(flash_attn.installed())
        stack.enter_context(remembered_sizes())
        stack.enter_context(export_left_out())
        stack.enter_context(fake.mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(cpp_composites(recipe.target))
        stack.enter_context(cuda_autocast(recipe.amp if recipe.target == "cuda" else "none"))
        stack.enter_context(modules.active())
        stack.enter_context(target_functions(recipe))
        stack.enter_context(uncollected())  # between steps only: frees are where reference counts put them
        stack.enter_context(explained(loaded, batch, seq))
        yield


@contextmanager
def recording(recorder: Recorder, target: str) -> Iterator[None]:
    """Within, the recorder sees what runs, and what a checkpoint keeps."""
    with ExitStack() as stack:
        if target == "cpu":  # elsewhere a generator's state lies in host memory
            stack.enter_context(generator_states(recorder.adopt))
        stack.enter_context(checkpointed_inputs(recorder.on_checkpoint))
        stack.enter_context(reentrant_gradients(recorder.on_reentrant))
        stack.enter_context(recorder)
        yield


@dataclass(slots=True)
class _Tracing:
    """What one trace runs on: a fake module and batch, and the readers of sizes, modules and answers."""

    module: nn.Module
    loaded: LoadedModel
    recipe: Recipe
    batch: dict[str, torch.Tensor]
    sizes: SizeReader
    modules: ModuleStack
    answers: Answers

    def forward(self) -> Recorder:
        """The forward without gradients."""
        recorder = Recorder(self.sizes, self.modules, self.answers)
        step = Step(self.module, self.loaded.call, self.recipe, None)
        Residents(self.module, None, self.batch, recorder, host_scalars=False).register()
        recorder.reset()
        self.answers.attach(recorder)
        with recording(recorder, self.recipe.target), torch.no_grad():
            recorder.on_phase("forward")
            step.prime(self.batch)
            outputs = step.forward(self.batch)
            loss = step.loss(outputs, self.batch)
            recorder.on_event("drop_outputs")
            del outputs
            step.hold(loss)
            recorder.on_event("drop_loss")
            del loss
        recorder.closed = True
        return recorder

    def steady_step(self) -> Recorder:
        """The first whole step that ends with as many bytes alive as it began with."""
        recipe, recorder = self.recipe, Recorder(self.sizes, self.modules, self.answers)
        optimizer = make_optimizer(self.module, recipe)
        host_scalars = recipe.target == "cuda" and resolved_impl(recipe) in ("foreach", "for-loop")
        residents = Residents(self.module, optimizer, self.batch, recorder, host_scalars=host_scalars)

        def on_loss(loss: torch.Tensor) -> None:
            recorder.saved.update(saved_storages(loss, recorder))

        step = Step(self.module, self.loaded.call, recipe, optimizer, recorder.on_phase, recorder.on_event, on_loss)
        recorder.silent = True
        with recorder:
            step.prime(self.batch)
        residents.held = step.held
        residents.register()
        if optimizer is not None:
            with recorder:
                recorder.on_phase("optimizer")
                for parameter in step.parameters:
                    parameter.grad = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype)
                optimizer.step()
                if recipe.zero_grad == "last":
                    for parameter in step.parameters:
                        parameter.grad = None
        gc.collect()
        recorder.silent = False
        for _ in range(_MAX_STEPS):
            recorder.reset()
            residents.register()
            self.answers.attach(recorder)
            before = live_bytes(recorder)
            recorder.entered = residents.note_gradients
            with recording(recorder, recipe.target):
                step(self.batch)
            residents.note_gradients()
            recorder.silent = True
            forgotten = residents.forget_states()
            gc.collect()
            recorder.silent = False
            if forgotten:
                continue
            if live_bytes(recorder) == before:
                recorder.closed = True
                return recorder
        raise InconclusiveError(
            f"the loop is not steady: after {_MAX_STEPS} steps more is alive at the end of a step than at its start",
            where=f"{before} bytes before, {live_bytes(recorder)} after",
            hint="something in the model keeps tensors from step to step",
        )


def live_bytes(recorder: Recorder) -> Any:
    """Bytes of the storages that are alive."""
    total: Any = 0
    for index in recorder.live.values():
        total = recorder.storages[index].nbytes + total
    return total


def trace(
    load: Callable[[], LoadedModel],
    recipe: Recipe,
    batch: int,
    seq: int,
    progress: Progress = lambda text: None,
    *,
    fold: bool = True,
) -> Traced:
    """The steady-state step of the model that `load` gives (called anew for each trace), valid at B=batch, S=seq.

    B and S stay symbols where the model's code allows it. PyTorch takes sizes of 1 apart: B=1 or S=1 is traced too. With `fold`
    the layers that repeat are traced once and the depth is the symbol L (`Traced.dims` has its value); where they do not repeat
    all of them are traced, and the assumptions say why. Of more than three micro-batches three are traced, and the second
    stands for all but the first and the last. The graph is that of what was traced.
    """
    if fold and recipe.accumulate > TRACED:
        traced = _trace(load, replace(recipe, accumulate=TRACED), batch, seq, progress, fold)
        programs = [p and collapsed(p, recipe.accumulate) for p in (traced.program, traced.general)]
        if programs[0] is not None and (traced.general is None or programs[1] is not None):
            return _finished(replace(traced, program=programs[0], general=programs[1]), recipe, batch, seq)
        progress("the micro-batches differ: tracing all of them")
    return _finished(_trace(load, recipe, batch, seq, progress, fold), recipe, batch, seq)


def _trace(load: Callable[[], LoadedModel], recipe: Recipe, batch: int, seq: int, progress: Progress, fold: bool) -> Traced:
    reason = ""
    progress("loading the model")
    loaded = [load()]

    def again() -> LoadedModel:
        """The model that is there already, once; a file may not stand to be imported a second time."""
        return loaded.pop() if loaded else load()

    if fold and is_deep(loaded[0]):
        try:
            folded = trace_folded(trace_once, again, recipe, batch, seq, progress)
            if folded is not None:
                return folded
        except FoldError as error:
            progress("the layers do not repeat: tracing all of them")
            where = f" ({error.where.splitlines()[0].strip()})" if error.where else ""
            reason = f"all layers were traced, no formula in L: {error.message}{where}"
    traced = trace_symbolically(trace_once, again, recipe, batch, seq, progress)
    traced.assumptions += [reason] if reason else []
    return traced


def _finished(traced: Traced, recipe: Recipe, batch: int, seq: int) -> Traced:
    """With the inputs of all of Trainer's micro-batches; the assumptions say which operators' workspaces are not counted."""
    if recipe.loop == "trainer":
        traced.program = with_all_batches(traced.program, recipe.accumulate)
        traced.general = traced.general and with_all_batches(traced.general, recipe.accumulate)
    unknown = without_rule(recipe.target, traced.program.counted(traced.dims))
    if unknown:
        named = ", ".join(f"{opcode} ({count})" for opcode, count in sorted(unknown.items()))
        traced.assumptions.append(f"no workspace is counted for operators without a rule on {recipe.target}: {named}")
    more = uncounted(traced.program, {**traced.dims, "B": batch, "S": seq}, recipe.gpu) if recipe.target == "cuda" else ""
    traced.assumptions += [more] if more else []
    return traced
