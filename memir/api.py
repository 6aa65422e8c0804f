"""The Python API: a model becomes a memory program, a program a peak, both a report. The command line calls only this."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, overload

from memir.errors import InconclusiveError, UsageError
from memir.hardware import Gpu, parse_gpu
from memir.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from memir.analysis.peak import Peak
    from memir.cache.record import Record
    from memir.cuda.verdict import Verdict
    from memir.derivation.step import WideStep
    from memir.frontend.loaded import LoadedModel
    from memir.frontend.trace import Traced
    from memir.ir.core import Program
    from memir.one_rank import RankProgram
    from memir.pipeline import Pipeline
    from memir.report import Report, Subject

DEFAULT_BATCH = 1
DEFAULT_SEQ = 2048  # or the model's limit, if that is smaller
VERSIONED = ("memir", "torch", "transformers", "peft")  # what the numbers depend on

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """What `program_of` gives: a traced step as plain data, and what was traced. It may come from the cache."""

    program: Program  # its domain holds at `point`
    general: Program | None  # of the neighbouring points, where `program` holds at the asked one only
    subject: Subject
    point: dict[str, int]  # B and S as asked, or their defaults
    dims: dict[str, int]  # further symbols of the programs, whose values the target itself fixes
    assumptions: tuple[str, ...]
    inconclusive: tuple[str, ...]  # what is not proven beyond the asked point

    @property
    def env(self) -> dict[str, int]:
        """A value for each of the program's dims, at the asked point."""
        known = {**self.dims, **self.point}
        return {name: known[name] for name in self.program.dims if name in known}


def trace(
    target: str | nn.Module,
    recipe: Recipe | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    sets: Mapping[str, object] | None = None,
    inputs: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda _: None,
) -> Traced:
    """One steady-state training step of the target as a memory program over B and S, valid at `batch` and `seq` at least.

    Every layer is traced, and in the graph.

    `target` is what the command line's TARGET is, or an nn.Module, which is left as it was. `batch` (default 1) and `seq`
    (default 2048, or the model's limit) count sequences and tokens. `sets` overrides fields of the model's config, `inputs`
    says how forward() is called, in the words of `--inputs`. `progress` is told what is being done.
    UsageError: a target, option or shape that cannot be meant. InconclusiveError: a step that cannot be followed.
    """
    _, traced, _ = _trace(target, recipe or Recipe(), batch, seq, sets, inputs, trust_remote_code, progress, fold=False)
    return traced


def program_of(
    target: str | nn.Module,
    recipe: Recipe | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    sets: Mapping[str, object] | None = None,
    inputs: str | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    fold: bool = True,
    parallel: str = "",
    progress: Progress = lambda _: None,
) -> TracedProgram:
    """The step of `trace` without its graph: the program that holds at `batch` and `seq`, and what a report says of it.

    With `fold`, layers that repeat are traced once, and the program is over the depth L too; TracedProgram.env has its value.
    With `cache`, a step that was traced before is read, without importing torch, and a new one is kept (docs/caching.md).
    `parallel` are passes as `--parallel` takes them, "fsdp{degree=8}": the program is the step of one rank, and B its batch.
    Other arguments and the errors are those of `trace`; a cache that cannot be used is a memir.cache.CacheWarning.
    """
    passes = _methods(parallel, recipe)
    traced = _program_of(target, recipe or Recipe(), batch, seq, sets, inputs, trust_remote_code, cache, fold, progress)
    if not passes.passes:
        return traced
    from memir.one_rank import check_stage, of_one_rank

    check_stage(parallel, passes)
    progress(f"applying {passes.spec()}")
    return _on_rank(traced, of_one_rank(traced.program, traced.general, traced.dims, passes))


def _methods(parallel: str, recipe: Recipe | None) -> Pipeline:
    """The passes of distributed methods, looked at before anything takes long."""
    from memir.pipeline import Pipeline

    if not parallel:
        return Pipeline()
    from memir.one_rank import methods

    return methods(parallel, 1 if recipe is None else recipe.accumulate)


def _on_rank(traced: TracedProgram, rank: RankProgram) -> TracedProgram:
    assumptions = (*traced.assumptions, *rank.told)
    return replace(traced, program=rank.program, general=rank.general, assumptions=assumptions)


def _program_of(
    target: str | nn.Module,
    recipe: Recipe,
    batch: int | None,
    seq: int | None,
    sets: Mapping[str, object] | None,
    inputs: str | None,
    trust_remote_code: bool,
    cache: bool,
    fold: bool,
    progress: Progress,
) -> TracedProgram:
    _check_positive(batch, seq)
    texts = {name: str(value) for name, value in (sets or {}).items()}
    lookup = None
    if cache and fold and isinstance(target, str):
        from memir.cache.lookup import open_lookup

        lookup = open_lookup(target, recipe, texts, inputs, trust_remote_code)
    found = lookup.find(DEFAULT_BATCH if batch is None else batch, seq, DEFAULT_SEQ) if lookup else None
    if found is not None:
        return _traced_program(str(target), *found)

    with lookup.watch if lookup else nullcontext():
        loaded, traced, point = _trace(target, recipe, batch, seq, sets, inputs, trust_remote_code, progress, fold=fold)
    record = _record(loaded, traced)
    if lookup and {field.name for field in fields(traced)} <= _KEPT:
        lookup.keep(record, point)
    return _traced_program(loaded.target, record, point)


def wide_step(
    target: str | nn.Module,
    recipe: Recipe | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    sets: Mapping[str, object] | None = None,
    inputs: str | None = None,
    trust_remote_code: bool = False,
    parallel: str = "",
    freeze: int = 0,
    symbols: Collection[str] | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> WideStep:
    """The step over the widths of its model too (`memir formula`): traced at several, generalized, verified at random ones.

    Arguments are those of `program_of`; B and S are where it is traced, at least 2 each; `symbols` are the widths that do not
    become numbers (None: all), `freeze` are leading layers that are not trained, `seed` chooses the widths of the
    verification. The errors are those of `trace`, and
    InconclusiveError where the fresh trace is another program.
    """
    recipe = recipe or Recipe()
    _check_positive(batch, seq)
    texts = {name: str(value) for name, value in (sets or {}).items()}
    progress("importing PyTorch")
    from memir.derivation.cuts import at_cut
    from memir.derivation.step import MEANINGS, WideStep
    from memir.frontend.load import load_target
    from memir.frontend.quiet import quiet
    from memir.frontend.widths.trace import trace_wide
    from memir.one_rank_widths import on_ranks

    passes = _methods(parallel, recipe)

    def load_at(further: Mapping[str, str], recipe: Recipe) -> LoadedModel:
        """The model with further options."""
        both = {**texts, **further}
        return load_target(target, recipe=recipe, sets=both, inputs=inputs, trust_remote_code=trust_remote_code, seq=seq)

    progress(f"loading {target if isinstance(target, str) else type(target).__name__}")
    with quiet():
        loaded = load_at({}, recipe)
        if seq is None:  # well within a table of positions: its last length runs other operators
            seq = min(DEFAULT_SEQ, (loaded.max_seq or 2 * DEFAULT_SEQ) // 2)
        wide = trace_wide(load_at, loaded, recipe, max(2, batch or 2), max(2, seq), seed, progress, symbols)
    step = WideStep(
        program=wide.program,
        symbols=wide.widths.symbols,
        fields=(*wide.widths.fields, *((name, "L") for name in _depth_fields(loaded))),
        env=wide.env,
        name=loaded.target,
        source=loaded.source,
        num_parameters=wide.num_parameters,
        recipe=tuple((field.name, getattr(recipe, field.name)) for field in fields(recipe)),
        versions=versions(),
        numbers=wide.numbers,
        assumptions=wide.assumptions,
        traced_at=wide.traced_at,
        verified_at=wide.verified_at,
    )
    if freeze:
        progress(f"freezing {freeze} layers")
        step = at_cut(step, freeze)
    if passes.passes:
        progress(f"applying {passes.spec()}")
        found = on_ranks(passes, step.program, step.env, MEANINGS)
        step = replace(
            step,
            program=found.program,
            degrees=found.degrees,
            env={**step.env, **{symbol: number for symbol, _, number in found.degrees}},
            recipe=(*step.recipe, ("parallel", passes.spec())),
        )
    return step


def _depth_fields(loaded: LoadedModel) -> list[str]:
    """The field of the configuration that says how many layers there are."""
    from memir.frontend.depth import DEPTH_NAME

    names = [name for name, value in loaded.config.items() if type(value) is int and DEPTH_NAME.match(name)]
    return [name for name in names if loaded.config[name] == len(loaded.layers)][:1]


@overload
def peak(program: Program) -> Peak: ...
@overload
def peak(program: Program, *, B: int, S: int, **dims: int) -> int: ...  # noqa: N803  (as the formulas name them)
def peak(program: Program, **dims: int) -> Peak | int:
    """The peak of a program: symbolic and exact; with a number for each of its dims, such as B and S, in requested bytes.

    UsageError: a dim that lacks, that the program does not have, or that lies outside of its domain.
    """
    from memir.analysis.domain import check
    from memir.analysis.peak import peak as symbolic

    if not dims:
        return symbolic(program)
    unknown = sorted(dims.keys() - set(program.dims))
    if unknown:
        raise UsageError(f"the program has no dim {', '.join(unknown)}", hint=f"it has: {', '.join(program.dims) or 'none'}")
    check(dims, program)
    return symbolic(program, env=dims).evaluate(dims)[0]


def analyze(
    target: str | nn.Module,
    recipe: Recipe | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    sets: Mapping[str, object] | None = None,
    inputs: str | None = None,
    trust_remote_code: bool = False,
    gpu: str | Gpu | None = None,
    alloc_conf: str = "",
    cache: bool = True,
    fold: bool = True,
    parallel: str = "",
    progress: Progress = lambda _: None,
) -> Report:
    """What `memir analyze` says, as plain data. Arguments and errors are those of `program_of`.

    Of a pipeline it is the answer for the stage that takes the most, with the figures of all in `stages`.
    `gpu` is what `--gpu` takes, a card's name or an amount of memory: its kernels are taken, and the report has a verdict, by
    the allocator with the settings `alloc_conf`, in the words of PYTORCH_CUDA_ALLOC_CONF.
    """
    recipe = recipe or Recipe()
    memory = parse_gpu(gpu) if isinstance(gpu, str) else gpu
    if memory is not None:
        recipe = on_gpu(recipe, memory)
    from memir.report import build_report, of_stages

    passes = _methods(parallel, recipe)
    traced = _program_of(target, recipe, batch, seq, sets, inputs, trust_remote_code, cache, fold, progress)
    steps: tuple[TracedProgram, ...] = (traced,)
    if passes.passes:
        from memir.one_rank import of_each_rank

        progress(f"applying {passes.spec()}")
        ranks = of_each_rank(parallel, traced.program, traced.general, traced.dims, passes)
        steps = tuple(_on_rank(traced, rank) for rank in ranks)
    reports = []
    for number, step in enumerate(steps):
        progress("computing the peak" + (f" of stage {number}" if len(steps) > 1 else ""))
        report = build_report(
            step.program,
            step.env,
            recipe,
            step.subject,
            general=step.general,
            assumptions=step.assumptions,
            inconclusive=step.inconclusive,
        )
        if memory is not None:
            progress("playing the allocator")
            verdict = judge_step(step, recipe, report.peak.allocated, memory, alloc_conf)
            told = (f"allocator settings: {alloc_conf}",) if alloc_conf else ()
            report = replace(report, verdict=verdict, assumptions=(*report.assumptions, *told))
        reports.append(report)
    return of_stages(reports)


def exact_peak(
    target: str | nn.Module,
    recipe: Recipe | None = None,
    *,
    parallel: str,
    batch: int,
    seq: int,
    sets: Mapping[str, object] | None = None,
    inputs: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda _: None,
) -> int:
    """The peak of one rank in requested bytes by PyTorch's own FSDP2 and DTensor, traced on fake tensors.

    It is what the passes of `parallel` are held against (`memir.frontend.exact`). All layers are traced, at one B and S.

    UsageError: methods of which that cannot be done. InconclusiveError: it was tried, and ended otherwise.
    """
    from memir.analysis.liveness import timeline
    from memir.frontend.exact_peak import exact_step
    from memir.frontend.load import load_target

    texts = {name: str(value) for name, value in (sets or {}).items()}

    def load(recipe: Recipe) -> LoadedModel:
        """The model anew."""
        return load_target(target, recipe=recipe, sets=texts, inputs=inputs, trust_remote_code=trust_remote_code, seq=seq)

    passes = _methods(parallel, recipe).spec()
    return timeline(exact_step(load, recipe or Recipe(), passes, batch, seq, progress)).evaluate({}).peak


def judge_step(traced: TracedProgram, recipe: Recipe, allocated: int, gpu: Gpu, alloc_conf: str = "") -> Verdict:
    """Whether a traced step with `allocated` bytes at its peak fits a GPU, by what the allocator would reserve."""
    from memir.cuda.verdict import judge

    ops = (op for op, _ in traced.program.counted(traced.env))
    trains = recipe.mode == "train"
    axes = len(traced.program.mesh)
    return _played(judge(gpu, ops, allocated, trains=trains, torch=installed_torch(), axes=axes), traced, alloc_conf)


def _played(verdict: Verdict, traced: TracedProgram, alloc_conf: str) -> Verdict:
    """The verdict by what the allocator would reserve, where it can be played."""
    from memir.allocator.room import room
    from memir.allocator.schedule import Kept
    from memir.allocator.settings import parse_settings

    kept = [Kept(held.each, phase) for held in verdict.workspaces for phase in held.phases]
    try:
        found = room(traced.program, traced.env, verdict.capacity, verdict.outside, kept, parse_settings(alloc_conf))
    except InconclusiveError:
        return verdict
    return replace(verdict, reserved=found.reserved, decided=found.answer, failure=found.failure)


def installed_torch() -> str:
    """The version of the PyTorch that is installed, without importing it."""
    import importlib.metadata  # it takes a while

    return importlib.metadata.version("torch")


def on_gpu(recipe: Recipe, gpu: Gpu) -> Recipe:
    """The recipe with the kernels of that GPU's card. UsageError where the recipe's target is no GPU."""
    if recipe.target != "cuda":
        raise UsageError(f"--gpu {gpu.name}: the target is {recipe.target}", hint="leave out  --gpu  or  --target cpu")
    return recipe if gpu.card is None or recipe.gpu else replace(recipe, gpu=gpu.card.compute)


def _trace(
    target: str | nn.Module,
    recipe: Recipe,
    batch: int | None,
    seq: int | None,
    sets: Mapping[str, object] | None,
    inputs: str | None,
    trust_remote_code: bool,
    progress: Progress,
    *,
    fold: bool,
) -> tuple[LoadedModel, Traced, dict[str, int]]:
    """The loaded model, its traced step, and the point that was asked about."""
    _check_positive(batch, seq)
    texts = {name: str(value) for name, value in (sets or {}).items()}
    progress("importing PyTorch")
    from memir.frontend.load import load_target
    from memir.frontend.quiet import quiet
    from memir.frontend.trace import trace as trace_loaded

    def load() -> LoadedModel:
        """The model anew for each trace, but the first time the one that told its limit."""
        if unused:
            return unused.pop()
        return load_target(target, recipe=recipe, sets=texts, inputs=inputs, trust_remote_code=trust_remote_code, seq=seq)

    unused: list[LoadedModel] = []
    progress(f"loading {target if isinstance(target, str) else type(target).__name__}")
    with quiet():
        loaded = load()
        unused.append(loaded)
        if seq is None:
            seq = min(DEFAULT_SEQ, loaded.max_seq or DEFAULT_SEQ)
        point = {"B": DEFAULT_BATCH if batch is None else batch, "S": seq}
        return loaded, trace_loaded(load, recipe, point["B"], point["S"], progress, fold=fold), point


def _check_positive(batch: int | None, seq: int | None) -> None:
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise UsageError(f"--{name}: {value} is not a positive number")


# The fields of Traced that a record has, and those that only the graph needs. With another one nothing is kept.
_KEPT = {"program", "general", "method", "num_parameters", "num_trainable", "assumptions", "inconclusive", "dims"}
_KEPT |= {"fx_graph", "symbols"}


def _record(loaded: LoadedModel, traced: Traced) -> Record:
    from memir.cache.record import Record

    return Record(
        program=traced.program,
        general=traced.general,
        method=traced.method,
        num_parameters=traced.num_parameters,
        num_trainable=traced.num_trainable,
        assumptions=tuple(traced.assumptions),
        inconclusive=tuple(traced.inconclusive),
        dims=tuple(getattr(traced, "dims", {}).items()),
        name=loaded.name,
        source=loaded.source,
        num_layers=len(loaded.layers) or None,
        max_seq=loaded.max_seq,
        versions=versions(),
    )


def versions() -> tuple[tuple[str, str], ...]:
    """The installed versions of what the numbers depend on."""
    import importlib.metadata  # it takes a while

    found = []
    for name in VERSIONED:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:  # memir run from a folder that was not installed
            continue
    return tuple(found)


def _traced_program(target: str, record: Record, point: dict[str, int]) -> TracedProgram:
    from memir.report import Subject

    return TracedProgram(
        program=record.program,
        general=record.general,
        subject=Subject(
            target=target,
            name=record.name,
            source=record.source,
            num_parameters=record.num_parameters,
            num_trainable=record.num_trainable,
            num_layers=record.num_layers,
            max_seq=record.max_seq,
            versions=record.versions,
        ),
        point=point,
        dims=dict(record.dims),
        assumptions=record.assumptions,
        inconclusive=record.inconclusive,
    )
