"""Programs whose number of repetitions is a symbol, analyzed at its two smallest values.

A body that is executed n times does the same in every iteration: it allocates and frees members of families, each of one size.
So the live bytes at one of its operators are affine in the iteration and in n: at the first and at the last iteration, and
everywhere outside of the Repeats, they are a line over n, and two values of n determine it. What could break this (a size with
the iteration in it, a storage that only the first iteration allocates) is looked for, and InconclusiveError says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from memir.analysis.liveness import Step, Timeline, flat_timeline, flatten, is_folded
from memir.errors import InconclusiveError
from memir.ir.core import Op, Phase, Program, Repeat
from memir.ir.domain import Condition, points
from memir.ir.names import rename_path, split
from memir.ir.size import ZERO, Monomial, Size, floor_div
from memir.ir.unroll import extents, unroll, unroll_located

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Frame:
    """A flat program: the whole one, or the one at a small number of repetitions.

    `positions[k]` is the operator of step k: operators outside of the Repeats once, those of a body in the first iteration and
    in the last.
    """

    program: Program
    line: Timeline
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Frames:
    """One frame of a program that is flat, or two from which every quantity at any number of repetitions follows.

    `symbol` is the one that counts, `low` its value in the first frame and `step` how much more it is in the second.
    `program` is the analyzed one, in which Repeats whose count is a number are written out.
    """

    program: Program
    frames: tuple[Frame, ...]
    symbol: str = ""
    low: int = 0
    step: int = 1

    def extend(self, numbers: Sequence[int], env: Mapping[str, int]) -> int:
        """A quantity at `env` from its value in each frame."""
        if len(numbers) == 1:
            return numbers[0]
        more = (env[self.symbol] - self.low) // self.step
        return numbers[0] + more * (numbers[1] - numbers[0])

    def extend_all(self, columns: Sequence[Mapping[K, Sequence[int]]], env: Mapping[str, int]) -> dict[K, list[int]]:
        """Groups of quantities by name at `env` from those in each frame; a name that a frame has not counts as zeros there."""
        names = dict.fromkeys(name for column in columns for name in column)
        width = max((len(numbers) for column in columns for numbers in column.values()), default=0)
        zeros = [0] * width
        return {
            name: [self.extend(parts, env) for parts in zip(*(column.get(name, zeros) for column in columns), strict=True)]
            for name in names
        }


def frames_of(program: Program, device: str = "gpu") -> tuple[Frames, Timeline]:
    """The frames of a program and its timeline; InconclusiveError where two frames do not determine it."""
    if not is_folded(program):
        flat = flatten(program)
        line = flat_timeline(flat, device)
        return Frames(flat, (Frame(flat, line, range(len(line.steps))),)), line
    program = unroll(program)
    symbol = _symbol(program)
    own = [text for text in program.domain if (c := Condition.read(text)) and c.symbols() == {symbol}]
    found = points([symbol], own, limit=2)
    if len(found) < 2:
        raise InconclusiveError(f"there are no two values of {symbol} to compare", where=f"program @{program.name}")
    low, high = (env[symbol] for env in found)
    _check(program)
    frames = tuple(_frame(program, {symbol: value}, device) for value in (low, high))
    all_frames = Frames(program, frames, symbol, low, high - low)
    return all_frames, _line(program, all_frames)


def played(frames: Frames, numbers: Sequence[int], env: Mapping[str, int]) -> Iterator[tuple[str, list[int]]]:
    """Each phase's numbers in order of execution, from those of the timeline's steps: between its first and its last
    iteration a body's go up evenly."""
    position = 0
    for phase in frames.program.phases:
        found: list[int] = []
        for op in phase.ops:
            if isinstance(op, Op):
                found.append(numbers[position])
                position += 1
                continue
            length, count = len(op.body), op.count.evaluate(env)
            first, last = numbers[position : position + length], numbers[position + length : position + 2 * length]
            position += 2 * length
            for number in range(count):
                found += [a + (b - a) * number // max(1, count - 1) for a, b in zip(first, last, strict=True)]
        yield phase.name, found


def _symbol(program: Program) -> str:
    declared = [s.name for s in program.storages] + [v.name for v in program.values]
    sizes = [op.count for op in _repeats(program)] + [n for name in declared for n in extents(name)]
    symbols = sorted({symbol for size in sizes for symbol in size.symbols()})
    if len(symbols) > 1:
        raise InconclusiveError(
            f"live bytes are computed for one number of repetitions that is a symbol, not for {', '.join(symbols)}",
            where=f"program @{program.name}",
            hint="give the others a value first (`bind` in memir.ir.unroll)",
        )
    return symbols[0]


def _repeats(program: Program) -> Iterator[Repeat]:
    return (op for phase in program.phases for op in phase.ops if isinstance(op, Repeat))


def _check(program: Program) -> None:
    """InconclusiveError if something in a body is not the same in every iteration."""
    indexed = {s.name for s in program.storages if not split(s.name)[1]}
    alive = {s.name for s in program.storages if s.live_in}
    families = {symbol for s in program.storages for n in extents(s.name) for symbol in n.symbols() & s.nbytes.symbols()}
    problem = f"the size of a family's members depends on {', '.join(sorted(families))}" if families else ""
    for phase in program.phases:
        for op in phase.ops:
            body = (op,) if isinstance(op, Op) else op.body
            for inner in body:
                if isinstance(inner, Repeat):
                    problem = problem or "a Repeat whose count is a symbol has another in it"
                    continue
                if isinstance(op, Repeat):
                    if inner.scratch.symbols() & {op.index, *op.count.symbols()}:
                        problem = problem or f"the scratch of {inner.opcode} changes from iteration to iteration"
                    if any(r.storage in indexed and r.storage not in alive for r in inner.results):
                        problem = problem or f"{inner.opcode} allocates in the first iteration only"
                alive.update(r.storage for r in inner.results)
    if problem:
        raise InconclusiveError(
            f"live bytes are not affine in the number of repetitions: {problem}", where=f"program @{program.name}"
        )


def _frame(program: Program, env: Mapping[str, int], device: str) -> Frame:
    flat = unroll_located(program, env)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, place in enumerate(flat.ops):
        first.setdefault(place, position)
        last[place] = position
    positions: list[int] = []
    place = 0
    for phase in program.phases:
        for op in phase.ops:
            if isinstance(op, Op):
                positions.append(first[place])
                place += 1
                continue
            inside = range(place + 1, place + 1 + len(op.body))
            positions += [first[k] for k in inside] + [last[k] for k in inside]
            place += 1 + len(op.body)
    return Frame(flat.program, flat_timeline(flat.program, device), positions)


def _line(program: Program, frames: Frames) -> Timeline:
    """The timeline over the symbol too."""
    a, b = (frame.line for frame in frames.frames)
    more = Size.of(frames.symbol) - frames.low
    if frames.step > 1:
        more = floor_div(more, frames.step)
    columns = _Columns(a.basis, b.basis, more)
    seen: dict[tuple[int, ...], int] = {}

    def point(p: int, q: int) -> int:
        return seen.setdefault(columns.vector(a.points[p], b.points[q]), len(seen))

    start = point(a.start, b.start)
    pairs = list(zip(*(frame.positions for frame in frames.frames), strict=True))
    running = tuple(point(a.running[p], b.running[q]) for p, q in pairs)
    after = tuple(point(a.after[p], b.after[q]) for p, q in pairs)
    return Timeline(tuple(_steps(program)), columns.basis, tuple(seen), start, running, after)


class _Columns:
    """From two points' coefficients, at the two values of the symbol, to those over the symbol."""

    def __init__(self, first: Sequence[Monomial], second: Sequence[Monomial], more: Size) -> None:
        monomials = sorted({*first, *second}, key=lambda m: Size(((m, 1),)).text())
        self._first = [monomials.index(m) for m in first]
        self._second = [monomials.index(m) for m in second]
        products = [Size(((m, 1),)) * more for m in monomials]
        self.basis = tuple(dict.fromkeys([*monomials, *(m for size in products for m, _ in size.terms)]))
        place = {m: k for k, m in enumerate(self.basis)}
        self._products = [[(place[m], c) for m, c in size.terms] for size in products]
        self._width = len(monomials)
        self.vector = lru_cache(maxsize=None)(self._vector)

    def _vector(self, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
        result = [0] * len(self.basis)
        growth = [0] * self._width
        for k, c in zip(self._first, first, strict=True):
            result[k] += c
            growth[k] -= c
        for k, c in zip(self._second, second, strict=True):
            growth[k] += c
        for product, amount in zip(self._products, growth, strict=True):
            if amount:
                for k, c in product:
                    result[k] += c * amount
        return tuple(result)


def _steps(program: Program) -> Iterator[Step]:
    """Operators once, those of a body with the indices of the first and of the last iteration in their module's path."""
    for phase in program.phases:
        for op in phase.ops:
            if isinstance(op, Op):
                yield Step(phase, op, (), op.frees)
            else:
                yield from _body(phase, op, ZERO)
                yield from _body(phase, op, op.count - 1)


def _body(phase: Phase, repeat: Repeat, number: Size) -> Iterator[Step]:
    for op in repeat.body:
        if isinstance(op, Op):
            yield Step(phase, replace(op, path=rename_path(op.path, {repeat.index: number})), (), op.frees)
