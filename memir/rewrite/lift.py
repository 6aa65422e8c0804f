"""A rewrite of flat programs made one of programs with Repeats: cost independent of depth, and formulas in it.

The rewrite is done on the program unrolled at a few small depths (and cuts); its results are laid side by side. Iterations
that differ only in the indices of their names become a Repeat again, and every index, count and size becomes the line through
the samples. Nothing is assumed about what the rewrite does: one more sample, which the lines did not see, has to come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from memir.errors import InconclusiveError
from memir.ir.core import Op, Phase, Program, Repeat, Storage, Value
from memir.ir.names import index_text, join
from memir.ir.size import ZERO, Gen, Size, floor_div
from memir.ir.unroll import Unrolls
from memir.rewrite.follow import follows
from memir.rewrite.samples import Block, Element, Family, Reading, Sample, ValueFamily, sampled

F = TypeVar("F", Family, ValueFamily)
Env = Mapping[str, int]
Rewrite = Callable[[Program, Env], tuple[Program, list[int]]]  # flat program, symbols -> the new one, each operator's origin


class LiftError(InconclusiveError):
    """The rewritten layers do not repeat as far as memir can follow: the rewrite is done on all layers."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The symbols that the samples vary, with the values of the first sample and a step for each further one."""

    first: tuple[tuple[str, int], ...]
    moving: tuple[str, ...]  # each is one stride larger in one further sample
    tied: tuple[tuple[str, str], ...] = ()  # (follower, leader): moves along with it
    stride: int = 1  # layers in a group that repeats as a whole

    def points(self) -> list[dict[str, int]]:
        """The samples' symbols: the first, one step along each axis, and a step along all of them, which is for checking."""
        base = dict(self.first)
        points = [base] + [self._moved(base, (name,)) for name in self.moving]
        return [*points, self._moved(self._moved(base, self.moving), self.moving[:1])]

    def _moved(self, env: dict[str, int], names: Sequence[str]) -> dict[str, int]:
        along = [*names, *(follower for follower, leader in self.tied if leader in names)]
        return {name: value + self.stride * along.count(name) for name, value in env.items()}


@dataclass(frozen=True, slots=True)
class Span:
    """What a lifted program is over: its symbols, where it is valid, and the samples.

    `axes.first` has a value for every symbol that counts layers; what the rewrite reads besides (a cut) is in it too.
    """

    axes: Axes
    dims: tuple[str, ...]
    domain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lifted:
    """A lifted program and the flat ones it was read from: the first sample, and one further along each of the axes.

    Each with the positions of its operators: those outside of the Repeats once, those of a body in the first iteration and in
    the last. `axes`: the symbols with their value in the first sample and how much more it is in a further one. There are none
    of a program that was rewritten as a whole.
    """

    program: Program
    samples: tuple[tuple[Program, tuple[int, ...]], ...] = ()
    axes: tuple[tuple[str, int, int], ...] = ()


class Shared:
    """What several lifts of one program share: what it is unrolled to, and the operators that were read for lifting."""

    def __init__(self, program: Program) -> None:
        self.unrolls = Unrolls(program)
        self.reading = Reading()


def lift(program: Program, rewrite: Rewrite, span: Span, shared: Shared | None = None) -> Lifted:
    """The program rewritten over a span of depths and cuts. LiftError where the samples have no common form."""
    axes, envs = span.axes, span.axes.points()
    shared = shared or Shared(program)
    samples = []
    for env in envs:
        base = shared.unrolls.at(env)
        samples.append(sampled(program, base, *rewrite(base.program, env), stride=axes.stride, reading=shared.reading))
    fit = _Fit(axes, envs)
    phases: list[Phase] = []
    for group in zip(*(s.phases for s in samples[:-1]), strict=True):
        if len({name for name, _ in group}) != 1:
            raise LiftError("the phases change with the number of layers")
        phases.append(Phase(group[0][0], tuple(_elements([elements for _, elements in group], fit))))
    new = Program(
        program.name,
        span.dims,
        tuple(dict.fromkeys((*span.domain, *_enough(phases, axes)))),
        program.mesh,
        _storages(samples[:-1], fit),
        _values(samples[:-1], fit),
        tuple(phases),
    )
    if not follows(new, samples, envs[-1], fit.number, fit.size):
        raise LiftError("the rewritten layers do not follow a line in their number")
    places = _positions(samples[:-1])
    along = tuple((name, dict(axes.first)[name], axes.stride) for name in axes.moving)
    return Lifted(new, tuple((s.program, at) for s, at in zip(samples, places, strict=False)), along)


def _positions(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """In each sample the operators of the lifted program, bodies in their first iteration and in their last."""
    found: list[list[int]] = [[] for _ in samples]
    ends = [0] * len(samples)
    for group in zip(*(s.phases for s in samples), strict=True):
        for items in zip(*(items for _, items in group), strict=True):
            repeats = len({item.count for item in items if isinstance(item, Block)}) > 1
            for k, item in enumerate(items):
                start, length = ends[k], 1 if isinstance(item, Element) else len(item.body) * item.count
                ends[k] += length
                if isinstance(item, Block) and repeats:
                    found[k] += [*range(start, start + len(item.body)), *range(ends[k] - len(item.body), ends[k])]
                else:
                    found[k] += range(start, ends[k])
    return [tuple(positions) for positions in found]


def _enough(phases: Sequence[Phase], axes: Axes) -> list[str]:
    """The conditions under which every Repeat is executed: first and last iteration are what liveness looks at."""
    conditions = []
    for phase in phases:
        for item in phase.ops:
            if isinstance(item, Repeat) and item.count.symbols() & set(axes.moving):
                count = _in_layers(item.count, axes)
                more = Size((m, c) for m, c in count.terms if c > 0)
                less = Size((m, -c) for m, c in count.terms if c < 0)
                conditions.append(f"{more} >= {less + axes.stride}")
    return conditions


def _in_layers(count: Size, axes: Axes) -> Size:
    """A number of groups, times the layers in a group: no quotient is left, as each symbol is whole groups from its first."""
    total = ZERO
    for monomial, coefficient in count.terms:
        atom = monomial[0][0] if monomial else ""
        if isinstance(atom, Gen):
            rest = atom.a.evaluate(dict(axes.first)) % axes.stride
            up = axes.stride if rest and atom.op == "ceil" else 0
            total = total + (atom.a - rest + up) * coefficient
        else:
            total = total + Size(((monomial, coefficient * axes.stride),))
    return total


class _Fit:
    """Lines through the samples: number = constant + one coefficient for each moving symbol."""

    def __init__(self, axes: Axes, envs: Sequence[Env]) -> None:
        self.moving = axes.moving
        more = {name: Size.of(name) - envs[0][name] for name in axes.moving}
        self.growth = {name: floor_div(size, axes.stride) if axes.stride > 1 else size for name, size in more.items()}
        self.number = lru_cache(maxsize=None)(self._number)  # most of an operator's numbers are another's too

    def _number(self, values: tuple[int, ...]) -> Size:
        total = Size.of(values[0])
        for name, value in zip(self.moving, values[1:], strict=True):
            if value != values[0]:
                total = total + self.growth[name] * (value - values[0])
        return total

    def size(self, values: Sequence[Size]) -> Size:
        if all(value is values[0] for value in values):
            return values[0]
        total = values[0]
        for name, value in zip(self.moving, values[1:], strict=True):
            if value is not values[0]:
                total = total + self.growth[name] * (value - values[0])
        return total


def _elements(groups: Sequence[Sequence[Element | Block]], fit: _Fit) -> list[Op | Repeat]:
    """One phase: the samples' operators and stretches side by side."""
    if len({len(group) for group in groups}) != 1:
        raise LiftError("the operators outside of the layers change with their number")
    result: list[Op | Repeat] = []
    for group in zip(*groups, strict=True):
        blocks = [item for item in group if isinstance(item, Block)]
        elements = [item for item in group if isinstance(item, Element)]
        if len(blocks) == len(group):
            result += _stretch(blocks, fit)
        elif len(elements) == len(group):
            result.append(_op(elements, (), fit))
        else:
            raise LiftError("layers stand where others have none")
    return result


def _stretch(blocks: Sequence[Block], fit: _Fit) -> list[Op | Repeat]:
    first = blocks[0]
    if any(len(b.body) != len(first.body) for b in blocks):
        raise LiftError("the layers change with their number")
    count = fit.number(tuple(b.count for b in blocks))
    bodies = list(zip(*(b.body for b in blocks), strict=True))
    if count.is_constant:
        return [
            _op([_moved(e, b.steps[k], i) for e, b in zip(group, blocks, strict=True)], (), fit)
            for i in range(count.constant)
            for k, group in enumerate(bodies)
        ]
    body = []
    for k, group in enumerate(bodies):
        steps = {b.steps[k] for b in blocks if b.count > 1}
        if len(steps) > 1:
            raise LiftError("the layers reach others at different distances")
        body.append(_op(group, steps.pop() if steps else (0,) * len(group[0].numbers), fit))
    return [Repeat("i", count, tuple(body))]


def _moved(element: Element, steps: Sequence[int], i: int) -> Element:
    return replace(element, numbers=tuple(n + s * i for n, s in zip(element.numbers, steps, strict=True))) if i else element


def _op(group: Sequence[Element], steps: Sequence[int], fit: _Fit) -> Op:
    """One operator: equal templates, each number a line, plus what an iteration adds."""
    first = group[0]
    if any(e.template != first.template for e in group):
        where = next(e for e in group if e.template != first.template)
        raise LiftError(
            "the layers are not equal", where=f"{first.op.opcode} @{first.op.path}, {where.op.opcode} @{where.op.path}"
        )
    numbers = [fit.number(values) for values in zip(*(e.numbers for e in group), strict=True)]
    if steps:
        numbers = [n + Size.of("i") * s for n, s in zip(numbers, steps, strict=True)]
    sizes = [fit.size(values) for values in zip(*(e.sizes for e in group), strict=True)]
    return first.build([index_text(n) for n in numbers], sizes)


def _storages(samples: Sequence[Sample], fit: _Fit) -> tuple[Storage, ...]:
    result = []
    for group in _aligned([s.storages for s in samples], "storages"):
        first = group[0]
        name, of = first.base, first.of
        if first.lengths != (1,) or any(f.length != 1 for f in group):
            name = join(name, (_extent(fit.number(tuple(f.length for f in group))),))
        if of is not None and first.of_ranged:
            start = fit.number(tuple(f.of_start for f in group))
            end = fit.number(tuple(f.of_start + f.length for f in group))
            whole = fit.number(tuple(f.of_total for f in group))
            if start is ZERO and end is whole:
                of = join(of, (_extent(end),))
            elif all(f.length == 1 for f in group):
                of = join(of, (index_text(start),))
            else:
                of = join(of, (f"{index_text(start) if start.terms else ''}:{index_text(end)}",))
        nbytes = fit.size([f.storage.nbytes for f in group])
        result.append(replace(first.storage, name=name, nbytes=nbytes, of=of))
    return tuple(result)


def _extent(size: Size) -> str:
    return f":{size.constant}" if size.is_constant else index_text(size)


def _values(samples: Sequence[Sample], fit: _Fit) -> tuple[Value, ...]:
    result = []
    for group in _aligned([s.values for s in samples], "values"):
        first = group[0]
        name, storage = first.base, first.storage_base
        if any(f.length != 1 for f in group) or first.ranged:
            extent = _extent(fit.number(tuple(f.length for f in group)))
            name = join(name, (extent,))
            if first.storage_ranged:
                storage = join(storage, (extent,))
        elif first.storage_ranged:
            storage = join(storage, (index_text(fit.number(tuple(f.storage_start for f in group))),))
        result.append(
            replace(
                first.value,
                name=name,
                storage=storage,
                shape=tuple(fit.size(s) for s in zip(*(f.value.shape for f in group), strict=True)),
                strides=tuple(fit.size(s) for s in zip(*(f.value.strides for f in group), strict=True)),
                offset=fit.size([f.value.offset for f in group]),
            )
        )
    return tuple(result)


def _aligned(groups: Sequence[Sequence[F]], what: str) -> list[tuple[F, ...]]:
    if len({len(g) for g in groups}) != 1:
        raise LiftError(f"the {what} change with the number of layers")
    aligned = list(zip(*groups, strict=True))
    for group in aligned:
        if len({f.base for f in group}) != 1:
            raise LiftError(f"the {what} change with the number of layers", where=", ".join(f.base for f in group))
    return aligned
