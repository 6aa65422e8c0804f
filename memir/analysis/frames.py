"""Programs whose numbers of repetitions are symbols (a depth; a depth and a cut), analyzed at their smallest values.

A body that is executed n times does the same in every iteration: it allocates and frees members of families, each of one size.
So the live bytes at one of its operators are affine in the iteration and in n: at the first and at the last iteration, and
everywhere outside of the Repeats, they are a line over n, and two values of n determine it (a plane over two symbols, and three
places). What could break this (a size with
the iteration in it, a storage that only the first iteration allocates) is looked for, and InconclusiveError says so.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from memir.analysis.liveness import Step, Timeline, flat_timeline, flatten, is_folded
from memir.errors import InconclusiveError
from memir.ir.core import Op, Phase, Program, Repeat
from memir.ir.domain import Condition, points
from memir.ir.names import rename_path, split
from memir.ir.size import ZERO, Atom, Gen, Monomial, Size, floor_div
from memir.ir.unroll import Unrolled, Unrolls, extents, unroll

K = TypeVar("K")
MAX_STEP = 64  # layers that repeat as one group


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
    """One frame of a program that is flat, or those from which every quantity at any number of repetitions follows.

    `axes` are the symbols that count, each with its value in the first frame and how much more it is in a further frame, in
    which the others are as in the first. `program` is the analyzed one; in it Repeats whose count is a number are written out.
    """

    program: Program
    frames: tuple[Frame, ...]
    axes: tuple[tuple[str, int, int], ...] = ()

    @property
    def symbol(self) -> str:
        """The symbol that counts the layers: the first one; empty where there is none."""
        return self.axes[0][0] if self.axes else ""

    def extend(self, numbers: Sequence[int], env: Mapping[str, int]) -> int:
        """A quantity at `env` from its value in each frame."""
        total = numbers[0]
        for (symbol, low, step), number in zip(self.axes, numbers[1:], strict=True):
            total += (env[symbol] - low) // step * (number - numbers[0])
        return total

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
    axes = _axes(program)
    _check(program)
    _check_sizes(program, axes)
    first = {symbol: low for symbol, low, _ in axes}
    places = [first, *({**first, symbol: low + step} for symbol, low, step in axes)]
    unrolls = Unrolls(program)
    frames = tuple(_frame(program, unrolls.at(env), device) for env in places)
    all_frames = Frames(program, frames, axes)
    return all_frames, _line(program, all_frames)


def frames_through(
    program: Program, samples: Sequence[tuple[Program, Sequence[int]]], axes: tuple[tuple[str, int, int], ...]
) -> tuple[Frames, Timeline]:
    """`frames_of` a program of which flat ones are there: at the axes' first values, and further along each of them.

    Each with the positions of its operators, bodies' in the first iteration and in the last.
    """
    _check(program)
    _check_sizes(program, axes)
    frames = Frames(program, tuple(Frame(flat, flat_timeline(flat), at) for flat, at in samples), axes)
    return frames, _line(program, frames)


def _axes(program: Program) -> tuple[tuple[str, int, int], ...]:
    """The symbols that count, with the value of the first frame and the step to a further one."""
    symbols = _symbols(program)
    own = [text for text in program.domain if (c := Condition.read(text)) and c.symbols() <= set(symbols)]
    conditions = [c for text in own if (c := Condition.read(text)) is not None]
    for env in sorted(points(symbols, own, limit=200), key=lambda env: sum(env.values())):
        steps = {symbol: _step(env, symbol, conditions) for symbol in symbols}
        if all(steps.values()):
            return tuple((symbol, env[symbol], steps[symbol]) for symbol in symbols)
    where = f"program @{program.name}"
    raise InconclusiveError(f"there are no two small values of {', '.join(symbols)} to compare", where=where)


def _step(env: Mapping[str, int], symbol: str, conditions: Sequence[Condition]) -> int:
    """How much more the symbol is at the next place in the domain, so that every place is whole steps away; 0: none is near."""
    near = range(1, MAX_STEP + 1)
    return next((step for step in near if all(c.holds({**env, symbol: env[symbol] + step}) for c in conditions)), 0)


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


def _symbols(program: Program) -> list[str]:
    """The symbols that count repetitions or members of families, in the order of the program's dims."""
    declared = [s.name for s in program.storages] + [v.name for v in program.values]
    sizes = [op.count for op in _repeats(program)] + [n for name in declared for n in extents(name)]
    symbols = {symbol for size in sizes for symbol in size.symbols()}
    members = [s.nbytes for s in program.storages if extents(s.name)]
    if len(symbols) > 2 or (len(symbols) == 2 and any(size.symbols() & symbols for size in members)):
        raise InconclusiveError(
            "live bytes are computed for one number of repetitions that is a symbol, or two that no member's size depends on, "
            f"not for {', '.join(sorted(symbols))}",
            where=f"program @{program.name}",
            hint="give the others a value first (`bind` in memir.ir.unroll)",
        )
    return [d for d in program.dims if d in symbols]


def _check_sizes(program: Program, axes: Sequence[tuple[str, int, int]]) -> None:
    """InconclusiveError where a size, a count or a family's extent is no line (or plane) over the places of the axes."""
    steps = {symbol: step for symbol, _, step in axes}
    declared = [s.name for s in program.storages] + [v.name for v in program.values]
    sizes = [op.count for op in _repeats(program)] + [n for name in declared for n in extents(name)]
    sizes += [s.nbytes for s in program.storages] + [op.scratch for op in _all_ops(program)]
    for size in dict.fromkeys(sizes):
        if not _is_affine(size, steps):
            where = f"program @{program.name}"
            raise InconclusiveError(f"live bytes are not affine in {', '.join(steps)}: there is a size {size}", where=where)


def _is_affine(size: Size, steps: Mapping[str, int]) -> bool:
    """Whether each of the symbols stands alone in each term: itself, or how many whole groups of layers it is."""
    for monomial, _ in size.terms:
        counting = [(atom, power) for atom, power in monomial if _reads(atom, steps)]
        if len(counting) > 1 or any(power != 1 or not (isinstance(a, str) or _is_even(a, steps)) for a, power in counting):
            return False
    return True


def _reads(atom: Atom, symbols: Container[str]) -> bool:
    return atom in symbols if isinstance(atom, str) else any(s in symbols for s in (*atom.a.symbols(), *atom.b.symbols()))


def _is_even(gen: Gen, steps: Mapping[str, int]) -> bool:
    """Whether a quotient goes up by a whole number with each step: then it is a line over the steps."""
    if gen.op not in ("floor", "ceil") or not gen.b.is_constant:
        return False
    up: dict[Monomial, int] = {((symbol, 1),): step for symbol, step in steps.items()}
    return all(not m or (m in up and c * up[m] % gen.b.constant == 0) for m, c in gen.a.terms)


def _all_ops(program: Program) -> Iterator[Op]:
    for phase in program.phases:
        for item in phase.ops:
            yield from [item] if isinstance(item, Op) else (op for op in item.body if isinstance(op, Op))


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


def _frame(program: Program, flat: Unrolled, device: str) -> Frame:
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
    """The timeline over the symbols too."""
    lines = [frame.line for frame in frames.frames]
    growth = []
    for symbol, low, step in frames.axes:
        more = Size.of(symbol) - low
        growth.append(floor_div(more, step) if step > 1 else more)
    columns = _Columns([line.basis for line in lines], growth)
    seen: dict[tuple[int, ...], int] = {}

    def point(places: Sequence[int]) -> int:
        vectors = tuple(line.points[p] for line, p in zip(lines, places, strict=True))
        return seen.setdefault(columns.vector(vectors), len(seen))

    start = point([line.start for line in lines])
    together = list(zip(*(frame.positions for frame in frames.frames), strict=True))
    running = tuple(point([line.running[p] for line, p in zip(lines, place, strict=True)]) for place in together)
    after = tuple(point([line.after[p] for line, p in zip(lines, place, strict=True)]) for place in together)
    return Timeline(tuple(_steps(program)), columns.basis, tuple(seen), start, running, after)


class _Columns:
    """From points' coefficients, in each frame, to those over the symbols."""

    def __init__(self, bases: Sequence[Sequence[Monomial]], growth: Sequence[Size]) -> None:
        monomials = sorted({m for basis in bases for m in basis}, key=lambda m: Size(((m, 1),)).text())
        self._places = [[monomials.index(m) for m in basis] for basis in bases]
        products = [[Size(((m, 1),)) * more for m in monomials] for more in growth]
        self.basis = tuple(dict.fromkeys([*monomials, *(m for row in products for size in row for m, _ in size.terms)]))
        place = {m: k for k, m in enumerate(self.basis)}
        self._products = [[[(place[m], c) for m, c in size.terms] for size in row] for row in products]
        self._width = len(monomials)
        self.vector = lru_cache(maxsize=None)(self._vector)

    def _vector(self, vectors: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        dense = []
        for places, vector in zip(self._places, vectors, strict=True):
            row = [0] * self._width
            for k, c in zip(places, vector, strict=True):
                row[k] += c
            dense.append(row)
        result = dense[0] + [0] * (len(self.basis) - self._width)
        for row, products in zip(dense[1:], self._products, strict=True):
            for before, now, product in zip(dense[0], row, products, strict=True):
                if now != before:
                    for k, c in product:
                        result[k] += c * (now - before)
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
