"""The peaks of one program at many points at once: whole columns of numbers, exact, in plain integers.

Requested bytes come from the program's exact formula (`memir.analysis.peak`), allocated bytes from the rounded program
(`memir.sweep.rounding`). Nothing depends on how many operators the program has once its points are pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from memir.analysis.domain import Range
from memir.analysis.dominance import Box
from memir.analysis.liveness import Timeline, Vector, basis_of
from memir.analysis.peak import Peak, Piece, Place, coefficients, peak
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.size import Gen, Monomial, Size
from memir.ir.unroll import bound_header
from memir.sweep.rounding import Bounded, timelines

Point = tuple[int, int]  # B, S
FEW = 4096  # values: below it more pruning costs more than it saves


@dataclass(frozen=True, slots=True)
class Numbers:
    """The bytes of one point, and where the requested peak is."""

    requested: int
    allocated: int
    steady_requested: int
    steady_allocated: int
    place: Place


class Grid:
    """A program's peaks as functions of B and S. `fixed` are values of its other symbols, such as {"L": 32}.

    `rounds` says whether the target's allocator rounds (cuda) or not (cpu). Errors are those of `timeline`; UsageError for a
    symbol that is neither B nor S nor fixed.
    """

    def __init__(self, program: Program, *, fixed: Mapping[str, int] | None = None, rounds: bool = True) -> None:
        self.program, self.rounds = program, rounds
        self.fixed = {name: value for name, value in (fixed or {}).items() if name in program.dims}
        unknown = [name for name in program.dims if name not in ("B", "S", *self.fixed)]
        if unknown:
            raise UsageError(f"no value is given for the symbol {', '.join(unknown)}", where=f"program @{program.name}")

    @cached_property
    def _lines(self) -> tuple[Timeline, Timeline]:
        return timelines(self.program, self.fixed)

    @property
    def _rounded(self) -> Timeline:
        return self._lines[1]

    @cached_property
    def formula(self) -> Peak:
        """The exact peak in requested bytes over B and S."""
        return peak(bound_header(self.program, self.fixed), line=self._lines[0])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the formula, in the order of their places: of equal ones the first is where the peak is."""
        return tuple(sorted(self.formula.total.pieces, key=lambda piece: piece.place.index))

    @cached_property
    def _bounded(self) -> Bounded:
        return Bounded(self._rounded.basis, self._rounded.points)

    def numbers(self, points: Sequence[Point]) -> list[Numbers]:
        """The bytes at every point, which must lie in the program's domain (`memir.sweep.pool` sees to it)."""
        if not points:
            return []
        basis = basis_of([self.formula.resident, *(piece.size for piece in self.pieces)])
        columns = self._columns(basis, points)
        requested = [0] * len(points)
        winner = [0] * len(points)
        for number, piece in enumerate(self.pieces):
            values = _weighted(coefficients(piece.size, basis), columns, len(points))
            for i, value in enumerate(values):
                if number == 0 or value > requested[i]:
                    requested[i], winner[i] = value, number
        places = [self.pieces[number].place for number in winner]
        steady = _weighted(coefficients(self.formula.resident, basis), columns, len(points))
        allocated, steady_allocated = requested, steady
        if self.rounds:
            allocated = self._allocated(points)
            start = [self._rounded.points[self._rounded.start]]
            steady_allocated = _largest(start, self._columns(self._rounded.basis, points), len(points))
        return [Numbers(*row) for row in zip(requested, allocated, steady, steady_allocated, places, strict=True)]

    def allocated(self, points: Sequence[Point]) -> list[int]:
        """Only the allocated bytes at the peak."""
        return self._allocated(points) if self.rounds else [n.requested for n in self.numbers(points)]

    def _allocated(self, points: Sequence[Point]) -> list[int]:
        found: dict[Point, int] = {}
        for part, among in self._parts(list(points), None):
            vectors = [self._rounded.points[i] for i in among]
            values = _largest(vectors, self._columns(self._rounded.basis, part), len(part))
            found.update(zip(part, values, strict=True))
        return [found[point] for point in points]

    def _parts(self, points: list[Point], among: list[int] | None) -> Iterator[tuple[list[Point], list[int]]]:
        """The points in boxes so small that few of the program's points can be the largest there, with those."""
        among = self._bounded.largest(self._box(points), among)
        halves = _halves(points) if len(points) * len(among) > FEW and len(among) > 2 else ()
        if not halves:
            yield points, among
        for half in halves:
            yield from self._parts(half, among)

    def _box(self, points: Sequence[Point]) -> Box:
        batches, seqs = ([point[axis] for point in points] for axis in (0, 1))
        return (("B", Range(min(batches), max(batches))), ("S", Range(min(seqs), max(seqs))))

    def _columns(self, basis: Sequence[Monomial], points: Sequence[Point]) -> list[list[int]]:
        """The value of each monomial at each point. InconclusiveError where one is not whole."""
        atoms = {"B": [batch for batch, _ in points], "S": [seq for _, seq in points]}
        return [_product(monomial, atoms, len(points)) for monomial in basis]


def _product(monomial: Monomial, atoms: dict[str, list[int]], count: int) -> list[int]:
    column: list[int] = [1] * count
    for atom, exponent in monomial:
        values = atoms[atom] if isinstance(atom, str) else _generator(atom, atoms, count)
        if exponent < 0:
            raise InconclusiveError(f"{Size(((monomial, 1),))} bytes need not be a whole number")
        for _ in range(exponent):
            column = [a * b for a, b in zip(column, values, strict=True)]
    return column


def _generator(gen: Gen, atoms: dict[str, list[int]], count: int) -> list[int]:
    """The values of `ceil(a/b)` and its like, kept among the atoms under its text, since a program has few of them."""
    key = gen.text()
    if key not in atoms:
        left, right = (
            _weighted([c for _, c in size.terms], [_product(m, atoms, count) for m, _ in size.terms], count)
            for size in (gen.a, gen.b)
        )
        pairs = zip(left, right, strict=True)
        if gen.op == "ceil":
            atoms[key] = [-(-a // b) for a, b in pairs]
        elif gen.op == "pow2":
            atoms[key] = [1 << max(0, a - 1).bit_length() for a in left]
        elif gen.op == "floor":
            atoms[key] = [a // b for a, b in pairs]
        else:
            atoms[key] = list(map(max if gen.op == "max" else min, left, right))
    return atoms[key]


def _weighted(vector: Sequence[int], columns: Sequence[Sequence[int]], count: int) -> list[int]:
    """The sum of the columns, each times its coefficient."""
    total = [0] * count
    for coefficient, column in zip(vector, columns, strict=True):
        if coefficient:
            total = [t + coefficient * x for t, x in zip(total, column, strict=True)]
    return total


def _largest(vectors: Sequence[Vector], columns: Sequence[Sequence[int]], count: int) -> list[int]:
    largest = _weighted(vectors[0], columns, count)
    for vector in vectors[1:]:
        largest = list(map(max, largest, _weighted(vector, columns, count)))
    return largest


def _halves(points: Sequence[Point]) -> tuple[list[Point], ...]:
    """The points cut in two across the axis whose ends differ by the larger factor; nothing where they are one."""
    spans = []
    for axis in (0, 1):
        values = sorted({point[axis] for point in points})
        spans.append((Fraction(values[-1], values[0]), axis, values))
    ratio, axis, values = max(spans, key=lambda span: span[0])
    if ratio == 1:
        return ()
    middle = values[len(values) // 2]
    low = [point for point in points if point[axis] < middle]
    high = [point for point in points if point[axis] >= middle]
    return (low, high)
