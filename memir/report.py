"""The answer as plain data: what a step takes at its peak, where, why, and as a formula.

`build_report` makes it from a program, a recipe and concrete symbols; the text, json and markdown backends print it. All
numbers are bytes. "Requested" is what the program asks for and what the formulas give; "allocated" is rounded as the target's
allocator rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from math import prod

from memir.analysis.domain import Range, check, domain_text, program_ranges
from memir.analysis.frames import Frame, Frames, frames_of, played
from memir.analysis.inventory import (
    Group,
    Key,
    Rounding,
    alive_at,
    collapse,
    grouped,
    held_by,
    is_unused,
    order,
    round_size,
    rounded_points,
)
from memir.analysis.liveness import Timeline, live_ranges, timeline
from memir.analysis.peak import START, Peak, peak
from memir.analysis.regions import maximum
from memir.analysis.words import Unit
from memir.cuda.verdict import Verdict
from memir.errors import MemirError
from memir.formulas import Formulas, Spot, formulas, formulas_in_cases
from memir.ir.core import Kind, Program
from memir.ir.size import Size
from memir.ir.symbolic import formula_text
from memir.ir.unroll import bound_header
from memir.recipe import Recipe

SCHEMA_VERSION = 1
SAMPLES = 60  # points of a phase's timeline that are kept for drawing
TOP = 20  # groups of storages that are listed
Option = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Subject:
    """What was analyzed. The frontend knows it; a program in text form has none of it."""

    target: str = ""  # as the user typed it
    name: str = ""  # the model's class, or the preset's name
    source: str = ""  # "model.py:118" of the class
    num_parameters: int | None = None
    num_trainable: int | None = None
    num_layers: int | None = None
    max_seq: int | None = None  # the longest sequence the model accepts
    versions: tuple[tuple[str, str], ...] = ()  # of memir, torch, transformers, ...


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes as requested, and as the target's allocator rounds them."""

    requested: int
    allocated: int


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """One phase: its largest live bytes, its formula, and a few points of its timeline for drawing."""

    name: str
    requested: int
    formula: str
    samples: tuple[int, ...]  # the largest live bytes in each of up to SAMPLES equal stretches of the phase


@dataclass(frozen=True, slots=True)
class DepthReport:
    """The formulas with the number of layers as a symbol too; text that sympy parses."""

    symbol: str  # "L"
    value: int  # the target's
    peak: str
    steady: str
    domain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage of a pipeline in short."""

    number: int  # from 0
    peak: Amount
    steady: Amount
    spot: Spot
    answer: str  # whether it fits the GPU that was named; "" where none was


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `memir analyze` says."""

    subject: Subject
    recipe: tuple[tuple[str, Option], ...]
    symbols: tuple[tuple[str, int], ...]  # the asked point
    peak: Amount
    spot: Spot  # of the requested peak
    steady: Amount
    phases: tuple[PhaseReport, ...]
    breakdown: tuple[tuple[str, int], ...]  # requested bytes at the peak by kind, largest first; sums to the peak
    top: tuple[Group, ...]
    unused: tuple[Group, ...]  # alive at the peak, never used again, freed later
    formulas: Formulas  # at the target's number of layers
    by_depth: DepthReport | None = None  # None where the layers were not folded
    kernels: tuple[str, ...] = ()  # of attention, in the order in which they run; () where its operators are the model's own
    verdict: Verdict | None = None  # whether it fits a GPU; None where none was named
    mesh: tuple[tuple[str, int], ...] = ()  # axes and degrees, where the step is one rank's of several
    stages: tuple[StageReport, ...] = ()  # of a pipeline; the rest of the report is that of the fullest
    host: int = 0  # requested bytes that the rank holds in the host's memory between steps
    assumptions: tuple[str, ...] = ()
    inconclusive: tuple[str, ...] = ()


def build_report(
    program: Program,
    env: Mapping[str, int],
    recipe: Recipe | Mapping[str, Option] | str | None = None,
    subject: Subject | None = None,
    *,
    general: Program | None = None,
    assumptions: Sequence[str] = (),
    inconclusive: Sequence[str] = (),
) -> Report:
    """The answer for a program at a point.

    `env` gives every dimension of the program a value. `recipe` is printed as it is; its `target` decides the rounding ("cuda"
    where it says nothing). `general` is the program of the neighbouring points where `program` holds at the asked one only.
    UsageError if a dimension lacks or lies outside of the domain; the errors of `timeline` where the
    program cannot be walked.
    """
    check(env, program)
    frames, general_line = frames_of(program)
    depth = {name: env[name] for name in (frames.symbol,) if name}
    line = general_line.bind(depth) if depth else general_line
    shown = bound_header(program, depth)
    point = {name: env[name] for name in shown.dims}
    numbers = line.evaluate(point)
    mathematics = peak(shown, line=line, env=point)
    if mathematics.evaluate(point)[0] != numbers.peak:
        raise MemirError(
            f"the formula gives {mathematics.evaluate(point)[0]} bytes and the walk {numbers.peak}", where=program.name
        )
    index = START if numbers.start == numbers.peak else numbers.running.index(numbers.peak)
    options = _options(recipe)
    rounding = round_size if dict(options).get("target", "cuda") == "cuda" else None
    looks = [_look(frame, index, point, rounding) for frame in frames.frames]

    def over(column: Callable[[_Look], Mapping[Key, tuple[int, ...]]]) -> dict[Key, list[int]]:
        return frames.extend_all([column(look) for look in looks], env)

    scratch = looks[0].scratch
    alive = over(lambda look: look.alive)
    breakdown = dict.fromkeys((str(kind) for kind in Kind), 0)
    for key, (nbytes, _) in alive.items():
        breakdown[key[0]] += nbytes
    breakdown[Kind.WORKSPACE] += scratch
    groups = [Group(nbytes, count, *key) for key, (nbytes, count) in alive.items()]
    if scratch:
        op = line.steps[index].op
        groups.append(Group(scratch, 1, Kind.WORKSPACE, op.opcode, collapse(op.path), op.source))
    unused = [Group(nbytes, count, *key) for key, (nbytes, count) in over(lambda look: look.unused).items()]
    allocated = [frames.extend(column, env) for column in zip(*(look.rounded for look in looks), strict=True)]
    symbolic = formulas(shown, mathematics, point)
    if general is not None:
        symbolic = formulas_in_cases(shown, *_shown(general, depth), mathematics, point)
    return Report(
        subject=subject or Subject(),
        recipe=options,
        symbols=tuple((name, point[name]) for name in shown.dims),
        peak=Amount(numbers.peak, max(allocated)),
        spot=_spot(line, index),
        steady=Amount(numbers.start, allocated[0]),
        phases=_phases(frames, numbers.running, mathematics, env),
        breakdown=tuple(sorted(breakdown.items(), key=lambda item: (-item[1], item[0]))),
        top=tuple(sorted(groups, key=order)[:TOP]),
        unused=tuple(sorted(unused, key=order)),
        formulas=symbolic,
        by_depth=_by_depth(program, general_line, env, frames.symbol) if depth else None,
        kernels=attention_kernels(program, env),
        mesh=tuple((axis, degree.evaluate(env)) for axis, degree in program.mesh),
        host=frames.extend([_on_host(frame.program, point) for frame in frames.frames], env) if program.mesh else 0,
        assumptions=tuple(assumptions),
        inconclusive=tuple(inconclusive),
    )


_KERNELS = {
    "aten._scaled_dot_product_flash_attention": "flash",
    "aten._scaled_dot_product_efficient_attention": "efficient",
    "aten._scaled_dot_product_cudnn_attention": "cudnn",
    "aten._scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten._safe_softmax": "math",
    "flash_attn._flash_attn_forward": "flash-attn-2",
}


def attention_kernels(program: Program, env: Mapping[str, int]) -> tuple[str, ...]:
    """The kernels that the program's attention takes, by the names of `--attention`."""
    return tuple(dict.fromkeys(_KERNELS[op.opcode] for op, _ in program.counted(env) if op.opcode in _KERNELS))


@dataclass(frozen=True, slots=True)
class _Look:
    """One frame at the place of the peak."""

    alive: dict[Key, tuple[int, int]]  # bytes and number of storages by group
    unused: dict[Key, tuple[int, int]]
    scratch: int
    rounded: list[int]  # at the step's start, and at each step of the timeline


def _look(frame: Frame, index: int, env: Mapping[str, int], rounding: Rounding | None) -> _Look:
    program, line = frame.program, frame.line
    at = START if index == START else frame.positions[index]
    ranges = live_ranges(program)
    alive = [ranges[name] for name in alive_at(program, line, at)]
    nbytes = _sizes(program, env)
    steady = [s.name for s in program.storages if s.live_in and s.device == "gpu"]
    points = rounded_points(line, nbytes, steady, env, rounding)
    unused = [live for live in alive if is_unused(live, at)]
    return _Look(
        grouped(line, alive, nbytes, lambda _: ""),
        grouped(line, unused, nbytes, lambda live: held_by(live, at)),
        line.steps[at].op.scratch.evaluate(env) if at != START else 0,
        [points[0], *(points[position + 1] for position in frame.positions)],
    )


def _shown(program: Program, depth: Mapping[str, int]) -> tuple[Program, Peak]:
    """A program's header at this depth, and its peak."""
    header = bound_header(program, depth)
    line = timeline(program)
    return header, peak(header, line=line.bind(depth) if depth else line)


def _by_depth(program: Program, line: Timeline, env: Mapping[str, int], symbol: str) -> DepthReport:
    symbolic = peak(program, line=line, env=env)
    return DepthReport(
        symbol=symbol,
        value=env[symbol],
        peak=maximum(symbolic.total),
        steady=formula_text(symbolic.resident, program.dims),
        domain=domain_text(program.dims, program.domain),
    )


def of_stages(reports: Sequence[Report]) -> Report:
    """The report of the stage that takes the most, the first of equals, which names all; a single one as it is."""
    if len(reports) == 1:
        return reports[0]
    stages = tuple(
        StageReport(number, r.peak, r.steady, r.spot, r.verdict.answer if r.verdict is not None else "")
        for number, r in enumerate(reports)
    )
    return replace(max(reports, key=lambda report: report.peak.allocated), stages=stages)


def stages_text(report: Report, unit: Unit) -> str:
    """The peaks of a pipeline's stages: `stages 12.30, 10.20, 10.20, 14.11 GiB; this is stage 3`."""
    peaks = ", ".join(unit.number(stage.peak.requested) for stage in report.stages)
    fullest = max(report.stages, key=lambda stage: stage.peak.allocated).number
    return f"stages {peaks} {unit.name}; this is stage {fullest}"


def mesh_text(report: Report) -> str:
    """Whose step it is: `one rank of 16: tensor-parallel 2 x fsdp 8, and 1.2 GiB on the host`; "" for a single GPU."""
    if not report.mesh:
        return ""
    axes = " x ".join(f"{axis} {degree}" for axis, degree in report.mesh)
    held = f", and {Unit.of(report.host).text(report.host)} on the host" if report.host >= 2**20 else ""
    return f"one rank of {prod(degree for _, degree in report.mesh)}: {axes}{held}"


def verdict_text(found: Verdict) -> str:
    """What of a GPU is counted: `5.05 allocated + 0.02 cuBLAS + 0.14 to 0.28 CUDA context of 14.58 GiB; ...`."""
    unit = Unit.of(found.capacity)
    held = sum(term.nbytes for term in found.workspaces)
    terms = [f"{unit.number(found.allocated)} allocated"]
    if found.reserved is not None:
        terms = [f"{unit.number(found.reserved)} reserved"]
    elif held:
        terms.append(f"{unit.number(held)} cuBLAS")
    if found.context[1]:
        terms.append(f"{unit.number(found.context[0])} to {unit.number(found.context[1])} CUDA context")
    if found.nccl[1]:
        terms.append(f"{unit.number(found.nccl[0])} to {unit.number(found.nccl[1])} NCCL")
    rest = "; fragmentation not counted" if found.reserved is None else ""
    rest = "; fits once cached blocks are given back" if found.after_giving_back else rest
    return f"{' + '.join(terms)} of {unit.text(found.capacity)}{rest}"


def program_report(program: Program, batch: int, seq: int) -> Report:
    """The answer for a program of which nothing else is known, at B=`batch` and S=`seq` (the program's limit if smaller)."""
    high = program_ranges(program).get("S", Range()).high
    env = {"B": batch, "S": seq if high is None else min(seq, high)}
    return build_report(program, {name: env[name] for name in program.dims if name in env})


def _options(recipe: Recipe | Mapping[str, Option] | str | None) -> tuple[tuple[str, Option], ...]:
    if recipe is None:
        return ()
    if isinstance(recipe, str):
        return (("recipe", recipe),)
    items: Iterable[tuple[str, object]]
    items = ((f.name, getattr(recipe, f.name)) for f in fields(recipe)) if is_dataclass(recipe) else recipe.items()
    return tuple((name, value if isinstance(value, Option) else str(value)) for name, value in items if value != "")


def _on_host(program: Program, env: Mapping[str, int]) -> int:
    return sum(s.nbytes.evaluate(env) for s in program.storages if s.live_in and s.device == "host")


def _sizes(program: Program, env: Mapping[str, int]) -> dict[str, int]:
    cache: dict[Size, int] = {}
    for storage in program.storages:
        if storage.nbytes not in cache:
            cache[storage.nbytes] = storage.nbytes.evaluate(env)
    return {storage.name: cache[storage.nbytes] for storage in program.storages}


def _spot(line: Timeline, index: int) -> Spot:
    if index == START:
        return Spot("start", "", "", "")
    step = line.steps[index]
    return Spot(step.phase.name, step.op.opcode, step.op.path, step.op.source)


def _phases(frames: Frames, running: Sequence[int], mathematics: Peak, env: Mapping[str, int]) -> tuple[PhaseReport, ...]:
    by_name: dict[str, list[int]] = {}
    for name, numbers in played(frames, running, env):
        if numbers:
            by_name.setdefault(name, []).extend(numbers)
    formulas = {name: maximum(envelope) for name, envelope in mathematics.phases}
    return tuple(
        PhaseReport(name, max(numbers), formulas[name], _samples(numbers, SAMPLES)) for name, numbers in by_name.items()
    )


def _samples(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """The largest number in each of `count` equal stretches, or all of them if there are fewer."""
    count = min(count, len(numbers))
    cuts = [i * len(numbers) // count for i in range(count + 1)]
    return tuple(max(numbers[a:b]) for a, b in pairwise(cuts))
