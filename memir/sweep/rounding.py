"""A program as the allocator sees it, and which of its points can be the largest there.

CUDA's allocator rounds every storage to 512 bytes. So the allocated bytes of a program are the requested bytes of the program
whose sizes are 512*ceil(nbytes/512), and everything that is known about live bytes as polynomials holds for it: nothing is
walked again for another B or S. Its points have many generators; the comparison of `memir.analysis.dominance` takes those that
two points do not share for endless, so here they are also compared between plain bounds: a/b <= ceil(a/b) <= (a + b - 1)/b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from operator import ge

from memir.analysis.dominance import Box, Comparer, prune
from memir.analysis.liveness import Timeline, Vector, basis_of, timeline
from memir.analysis.peak import coefficients
from memir.ir.core import Op, Program, Repeat
from memir.ir.size import Gen, Monomial, Size, ceil_div

GRAIN = (
    512  # bytes: kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp; memir.analysis.inventory.round_size is the same of a number
)


def rounded(nbytes: Size) -> Size:
    """What CUDA's allocator gives for a request."""
    return GRAIN * ceil_div(nbytes, GRAIN)


def timelines(program: Program, fixed: Mapping[str, int]) -> tuple[Timeline, Timeline]:
    """Requested and allocated bytes over B and S, with the other symbols as in `fixed`. Errors are those of `timeline`.

    The program is walked once, with a symbol for each of its sizes, in whose place come the sizes and the rounded sizes.
    """
    sizes = {storage.nbytes for storage in program.storages}
    sizes.update(op.scratch for phase in program.phases for op in operators(phase.ops))
    if any(size.symbols() - {"B", "S"} for size in sizes):  # a walk looks whether a size depends on the layer: it has to see it
        requested, allocated = timeline(program), timeline(with_sizes(program, rounded))
        return (requested.bind(fixed), allocated.bind(fixed)) if fixed else (requested, allocated)
    names = {size: f"size{number}" for number, size in enumerate(sorted(sizes, key=Size.text))}
    line = timeline(with_sizes(program, lambda size: Size.of(names[size])))
    line = line.bind(fixed) if fixed else line
    return _put(line, {name: size for size, name in names.items()}), _put(line, {n: rounded(size) for size, n in names.items()})


def _put(line: Timeline, sizes: Mapping[str, Size]) -> Timeline:
    """The timeline with sizes in the place of symbols."""
    products = [Size(((monomial, 1),)).substitute(sizes) for monomial in line.basis]
    basis = basis_of(products)
    columns = [coefficients(product, basis) for product in products]
    seen: dict[Vector, int] = {}
    moved = []
    for point in line.points:
        terms = [[c * x for x in column] for c, column in zip(point, columns, strict=True) if c]
        vector = tuple(map(sum, zip(*terms, strict=True))) if terms else (0,) * len(basis)
        moved.append(seen.setdefault(vector, len(seen)))
    running, after = (tuple(moved[p] for p in points) for points in (line.running, line.after))
    return replace(line, basis=basis, points=tuple(seen), start=moved[line.start], running=running, after=after)


def with_sizes(program: Program, change: Callable[[Size], Size]) -> Program:
    """The program with every storage's bytes and every scratch changed; no scratch stays none."""
    known: dict[Size, Size] = {}

    def changed(size: Size) -> Size:
        if size not in known:
            known[size] = change(size)
        return known[size]

    def body(ops: Iterable[Op | Repeat]) -> tuple[Op | Repeat, ...]:
        return tuple(
            replace(op, body=body(op.body))
            if isinstance(op, Repeat)
            else replace(op, scratch=changed(op.scratch))
            if op.scratch.terms
            else op
            for op in ops
        )

    storages = tuple(replace(storage, nbytes=changed(storage.nbytes)) for storage in program.storages)
    phases = tuple(replace(phase, ops=body(phase.ops)) for phase in program.phases)
    return replace(program, storages=storages, phases=phases)


def operators(body: Iterable[Op | Repeat]) -> Iterator[Op]:
    """Every operator once, those within Repeats too."""
    for op in body:
        if isinstance(op, Repeat):
            yield from operators(op.body)
        else:
            yield op


class Bounded:
    """Points over a basis with generators, each between two polynomials without those of `ceil(a/number)`."""

    def __init__(self, basis: Sequence[Monomial], points: Sequence[Vector]) -> None:
        self.basis, self.points = tuple(basis), tuple(points)
        pairs = [_between(monomial) for monomial in basis]
        scale = lcm(*(divisor for pair in pairs for _, divisor in pair))
        low, high = ([pair[side][0] * (scale // pair[side][1]) for pair in pairs] for side in (0, 1))
        rows: dict[Monomial, int] = {}
        for size in (*low, *high):
            for monomial, _ in size.terms:
                rows.setdefault(monomial, len(rows))
        self._comparer = Comparer(tuple(rows))
        self._low = [_combined(point, low, high, rows) for point in points]
        self._high = [_combined(point, high, low, rows) for point in points]

    def largest(self, box: Box, among: Sequence[int] | None = None) -> list[int]:
        """Positions of points that may be the largest of all somewhere on the box; the largest is always among them."""
        among = range(len(self.points)) if among is None else among
        projected = self._comparer.project([self._low[i] for i in among] + [self._high[i] for i in among], box)
        low, high = projected[: len(among)], projected[len(among) :]
        best = [low[k] for k in _maximal(low)]
        kept = [i for i, upper, own in zip(among, high, low, strict=True) if not _is_below(upper, own, best)]
        return [kept[k] for k in prune([self.points[i] for i in kept], Comparer(self.basis), box)]


def lower_bound(size: Size) -> tuple[Size, int]:
    """A polynomial and the number it is to be divided by: together nowhere above `size`; equal where it has no generators."""
    parts = [(_between(monomial)[0], coefficient) for monomial, coefficient in size.terms if coefficient > 0]
    parts += [(_between(monomial)[1], coefficient) for monomial, coefficient in size.terms if coefficient < 0]
    scale = lcm(*(divisor for (_, divisor), _ in parts))
    total = Size()
    for (bound, divisor), coefficient in parts:
        total = total + bound * (coefficient * (scale // divisor))
    return total, scale


def _is_below(upper: Vector, own: Vector, lows: Sequence[Vector]) -> bool:
    """Whether another point's lower bound is nowhere below `upper`; where both bounds are one, the point itself is no other."""
    return any(all(map(ge, low, upper)) for low in lows if low != own)


def _maximal(vectors: Sequence[Vector], limit: int = 16) -> list[int]:
    """Up to `limit` of the vectors that no other one is at least equal to in every place."""
    kept: list[int] = []
    for i in sorted(range(len(vectors)), key=lambda i: (-sum(vectors[i]), i)):
        if len(kept) == limit:
            break
        if not any(all(map(ge, vectors[k], vectors[i])) for k in kept):
            kept.append(i)
    return kept


def _combined(point: Vector, positive: Sequence[Size], negative: Sequence[Size], rows: dict[Monomial, int]) -> Vector:
    total = [0] * len(rows)
    for coefficient, up, down in zip(point, positive, negative, strict=True):
        for monomial, factor in (up if coefficient > 0 else down).terms if coefficient else ():
            total[rows[monomial]] += coefficient * factor
    return tuple(total)


def _between(monomial: Monomial) -> tuple[tuple[Size, int], tuple[Size, int]]:
    """A lower and an upper bound of a monomial, each a size over a number; the monomial itself if it has no such generator."""
    own = Size(((monomial, 1),))
    found = [(atom, exponent) for atom, exponent in monomial if isinstance(atom, Gen)]
    if len(found) != 1 or found[0][1] != 1 or found[0][0].op != "ceil" or not found[0][0].b.is_constant:
        return (own, 1), (own, 1)
    gen = found[0][0]
    divisor = gen.b.constant
    whole = all(
        isinstance(atom, str) and exponent > 0
        for m, _ in (*gen.a.terms, (monomial, 1))
        for atom, exponent in m
        if atom is not gen
    )
    if divisor < 1 or not whole:
        return (own, 1), (own, 1)
    others = Size(((tuple(factor for factor in monomial if factor[0] is not gen), 1),))
    return (others * gen.a, divisor), (others * (gen.a + (divisor - 1)), divisor)
