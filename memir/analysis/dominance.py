"""Which of many polynomials matter for their maximum over a range of whole numbers.

The one idea: on a box (a range for each symbol) write every polynomial in a basis whose functions are all non-negative on the
box. Then p >= q holds wherever each coefficient of p is at least that of q, and comparing two polynomials is comparing two
tuples. For a range without end the basis is powers of (x - low), which is the substitution B = 1 + b, S = 1 + s; for one with
an end it is the Bernstein basis of the range (R. T. Farouki, "The Bernstein polynomial basis: a centennial retrospective",
Computer Aided Geometric Design 29, 2012), which becomes tight as boxes get smaller. So cutting the box where no polynomial
rules alone proves which ones ever attain the maximum.

Generators that are not polynomials become a polynomial bound plus a slack variable with its own range: ceil(a/b) = (a + s)/b
with 0 <= s <= b - 1, and so on (`Comparer._generator`). The slack is taken as free: what is proved with it is true without.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import comb, lcm
from operator import ge

from memir.analysis.domain import Range
from memir.analysis.liveness import Vector
from memir.ir.size import Gen, Monomial, Size, monomial_value

Box = tuple[tuple[str, Range], ...]
Poly = dict[tuple[tuple[str, int], ...], Fraction]  # monomial over symbols and slack variables -> coefficient
MAX_BOXES = 400  # boxes that `attained` looks at before it keeps what it could not decide
MAX_CERTAIN = 24  # polynomials whose blends are tried against those that boxes could not decide
MAX_VALUES = 128  # of a symbol whose values are looked at one by one
MAX_BOUNDED_SLACKS = 2  # beyond it slack ranges are taken as endless, so that the tensor basis stays small
FAR = 2**40  # no batch and no sequence is longer


class Comparer:
    """Rewrites vectors over one basis of monomials so that comparing coefficients compares values on a box."""

    def __init__(self, basis: Sequence[Monomial]) -> None:
        self.basis = tuple(basis)
        generators = [atom for monomial in basis for atom, _ in monomial if isinstance(atom, Gen)]
        self.has_generators = bool(generators)
        self.has_extrema = any(word in gen.text() for gen in generators for word in ("max(", "min("))
        self.other_form = False  # of max and min, see `_generator`

    def project(self, vectors: Sequence[Vector], box: Box) -> list[Vector]:
        """The vectors' coefficients in a non-negative basis of the box, times one positive number.

        What all of them share is left out: only comparisons among these vectors have a meaning.
        """
        active = [i for i, column in enumerate(zip(*vectors, strict=True)) if any(c != column[0] for c in column)]
        columns, height = self._columns([self.basis[i] for i in active], box)
        projected = []
        for vector in vectors:
            total = [0] * height
            for i, column in zip(active, columns, strict=True):
                coefficient = vector[i]
                if coefficient:
                    for row, factor in column:
                        total[row] += coefficient * factor
            projected.append(tuple(total))
        return projected

    def _columns(self, monomials: Sequence[Monomial], box: Box) -> tuple[list[list[tuple[int, int]]], int]:
        """For each monomial its (row, factor) pairs, and the number of rows."""
        ranges = dict(box)
        signs: dict[str, Range | None] = dict(ranges)  # None: a slack of unknown sign, compared for equality
        polynomials = [self._expand(monomial, ranges, signs) for monomial in monomials]
        scale = lcm(*(value.denominator for polynomial in polynomials for value in polynomial.values()))
        lowest: dict[str, int] = {}
        degree: dict[str, int] = {}
        for monomial in itertools.chain.from_iterable(polynomials):
            for name, exponent in monomial:
                lowest[name] = min(lowest.get(name, 0), exponent)
                degree[name] = max(degree.get(name, 0), exponent)
        names = sorted(degree)
        slack_count = sum(1 for name in names if name not in ranges and signs[name] is not None)
        tables = []
        for name in names:  # multiplying every polynomial by name^-lowest > 0 keeps the order and clears denominators
            allowed = signs[name] or Range(0)
            if name not in ranges and slack_count > MAX_BOUNDED_SLACKS:
                allowed = Range(0)
            tables.append(_axis(degree[name] - lowest[name], allowed))
        opaque = [i for i, name in enumerate(names) if signs[name] is None]
        rows: dict[tuple[int, ...], int] = {}
        twins: dict[tuple[int, ...], int] = {}  # the negated row of what is compared for equality
        columns = []
        for polynomial in polynomials:
            column: dict[int, int] = {}
            for monomial, coefficient in polynomial.items():
                exponents = dict(monomial)
                axes = [table[exponents.get(name, 0) - lowest[name]] for name, table in zip(names, tables, strict=True)]
                for key, value in _tensor(axes, int(coefficient * scale)):
                    row = rows.setdefault(key, len(rows) + len(twins))
                    column[row] = column.get(row, 0) + value
                    if any(key[i] for i in opaque):
                        row = twins.setdefault(key, len(rows) + len(twins))
                        column[row] = column.get(row, 0) - value
            columns.append(list(column.items()))
        return columns, len(rows) + len(twins)

    def _expand(self, monomial: Monomial, ranges: Mapping[str, Range], signs: dict[str, Range | None]) -> Poly:
        total: Poly = {(): Fraction(1)}
        for atom, exponent in monomial:
            if isinstance(atom, str):
                factor: Poly = {((atom, exponent),): Fraction(1)}
                signs.setdefault(atom, Range(1))
            elif exponent < 0:
                name = f"?{atom.text()}^{exponent}"
                signs[name] = None
                factor = {((name, 1),): Fraction(1)}
            else:
                base = self._generator(atom, ranges, signs)
                factor = {(): Fraction(1)}
                for _ in range(exponent):
                    factor = _product(factor, base)
            total = _product(total, factor)
        return total

    def _generator(self, gen: Gen, ranges: Mapping[str, Range], signs: dict[str, Range | None]) -> Poly:
        """A generator as a polynomial over the symbols and one slack variable, true on the box."""
        a, b = self._size(gen.a, ranges, signs), self._size(gen.b, ranges, signs)
        slack = f"?{gen.text()}"
        one: Poly = {((slack, 1),): Fraction(1)}
        low_a, high_a = _bounds(a, signs)
        low_b, high_b = _bounds(b, signs)
        if gen.op in ("max", "min"):
            low, high = _bounds(_sum(a, b, -1), signs)
            if low is not None and low >= 0:
                return a if gen.op == "max" else b
            if high is not None and high <= 0:
                return b if gen.op == "max" else a
            if gen.op == "max":  # a + s, s = max(0, b - a); in the other form b + s
                signs[slack] = Range(0)
                return _sum(b if self.other_form else a, one, 1)
            if low_a is not None and low_b is not None and min(low_a, low_b) >= 0 and not self.other_form:
                ends = [-int(-h // 1) for h in (high_a, high_b) if h is not None]
                signs[slack] = Range(0, min(ends) if ends else None)  # s, 0 <= s <= the lesser end
                return one
            signs[slack] = Range(0)  # a - s, s = max(0, a - b)
            return _sum(a, one, -1)
        if gen.op == "pow2":  # a + s, 0 <= s < a; in the other form 2a - s
            signs[slack] = Range(0, None if high_a is None else max(0, -int(-high_a // 1)))
            return _sum(_sum(a, a, 1), one, -1) if self.other_form else _sum(a, one, 1)
        if gen.b.is_constant and gen.b.constant > 0:  # (a + s)/b for ceil, (a + s - edge)/b for floor, s in 0..edge
            divisor = gen.b.constant
            whole = all(exponent > 0 for monomial, _ in gen.a.terms for _, exponent in monomial)
            edge = divisor - 1 if whole else divisor
            signs[slack] = Range(0, edge)
            shifted = _sum(_sum(a, one, 1), {(): Fraction(0 if gen.op == "ceil" else -edge)}, 1)
            return {m: c / divisor for m, c in shifted.items() if c}
        if len(b) == 1 and low_b is not None and low_b > 0:  # a/b + s for ceil, a/b - 1 + s for floor, s in 0..1
            (monomial, coefficient) = next(iter(b.items()))
            inverse: Poly = {tuple((name, -e) for name, e in monomial): 1 / coefficient}
            signs[slack] = Range(0, 1)
            quotient = _sum(_product(a, inverse), one, 1)
            return quotient if gen.op == "ceil" else _sum(quotient, {(): Fraction(-1)}, 1)
        signs[slack] = Range(0) if low_a is not None and low_a >= 0 and low_b is not None and low_b > 0 else None
        return one

    def _size(self, size: Size, ranges: Mapping[str, Range], signs: dict[str, Range | None]) -> Poly:
        total: Poly = {}
        for monomial, coefficient in size.terms:
            total = _sum(total, self._expand(monomial, ranges, signs), coefficient)
        return total


def _tensor(axes: Sequence[Sequence[tuple[int, int]]], factor: int) -> list[tuple[tuple[int, ...], int]]:
    """The product of one (index, coefficient) list an axis, times a factor."""
    total: list[tuple[tuple[int, ...], int]] = [((), factor)]
    for axis in axes:
        total = [((*key, index), value * more) for key, value in total for index, more in axis]
    return total


def _axis(degree: int, allowed: Range) -> list[list[tuple[int, int]]]:
    """For each power x^0 .. x^degree its (index, coefficient) pairs in a non-negative basis of the range."""
    low = allowed.low
    if allowed.high is None:
        return [[(k, comb(e, k) * low ** (e - k)) for k in range(e + 1) if k == e or low] for e in range(degree + 1)]
    width = allowed.high - low
    scale = lcm(*(comb(degree, k) for k in range(degree + 1)))
    powers = []
    for e in range(degree + 1):
        shifted = [comb(e, k) * low ** (e - k) * width**k for k in range(e + 1)]
        powers.append(
            [
                (i, sum(comb(i, k) * scale // comb(degree, k) * shifted[k] for k in range(min(i, e) + 1)))
                for i in range(degree + 1)
            ]
        )
    return powers


def _product(p: Poly, q: Poly) -> Poly:
    total: Poly = {}
    for m1, c1 in p.items():
        for m2, c2 in q.items():
            exponents = dict(m1)
            for name, exponent in m2:
                exponents[name] = exponents.get(name, 0) + exponent
            key = tuple(sorted((name, e) for name, e in exponents.items() if e))
            total[key] = total.get(key, Fraction(0)) + c1 * c2
    return total


def _sum(p: Poly, q: Poly, times: int) -> Poly:
    total = dict(p)
    for monomial, coefficient in q.items():
        total[monomial] = total.get(monomial, Fraction(0)) + times * coefficient
    return {m: c for m, c in total.items() if c}


def _bounds(p: Poly, signs: Mapping[str, Range | None]) -> tuple[Fraction | None, Fraction | None]:
    """A lower and an upper bound by interval arithmetic over the ranges; None where there is none."""
    low: Fraction | None = Fraction(0)
    high: Fraction | None = Fraction(0)
    for monomial, coefficient in p.items():
        least, most = Fraction(1), Fraction(1)
        endless = False
        for name, exponent in monomial:
            allowed = signs[name]
            if allowed is None or (exponent < 0 and allowed.low < 1):
                return None, None
            ends = (allowed.low, allowed.high) if exponent > 0 else (allowed.high, allowed.low)
            least *= Fraction(ends[0]) ** exponent if ends[0] is not None else 0
            if ends[1] is None:
                endless = True
            else:
                most *= Fraction(ends[1]) ** exponent
        upper, lower = (None if endless else coefficient * most), coefficient * least
        if coefficient < 0:
            lower, upper = upper, lower  # type: ignore[assignment]
        low = None if low is None or lower is None else low + lower
        high = None if high is None or upper is None else high + upper
    return low, high


def prune(vectors: Sequence[Vector], comparer: Comparer, box: Box) -> list[int]:
    """Positions of the vectors that no other one dominates everywhere on the box; of equal ones the first is kept."""
    kept = _front(comparer.project(vectors, box))
    if comparer.has_extrema and len(kept) > 1:  # what one form of max and min cannot show, the other may
        comparer.other_form = True
        kept = [kept[i] for i in _front(comparer.project([vectors[i] for i in kept], box))]
        comparer.other_form = False
    return kept


def _front(projected: Sequence[Vector]) -> list[int]:
    """Positions of the tuples that no other one is at least equal to in every place."""
    sums = [sum(p) for p in projected]
    front: list[Vector] = []
    kept: list[int] = []
    for i in sorted(range(len(projected)), key=lambda i: (-sums[i], i)):
        candidate = projected[i]
        for place, better in enumerate(front):
            if all(map(ge, better, candidate)):
                if place > 3:  # what dominated once will dominate again
                    front.insert(0, front.pop(place))
                break
        else:
            front.append(candidate)
            kept.append(i)
    return sorted(kept)


def values(vectors: Sequence[Vector], basis: Sequence[Monomial], point: Mapping[str, int]) -> list[Fraction | int]:
    """The vectors' exact values at a point."""
    factors = [monomial_value(monomial, point) for monomial in basis]
    return [sum(c * f for c, f in zip(v, factors, strict=True) if c) for v in vectors]


def attained(
    vectors: Sequence[Vector],
    comparer: Comparer,
    box: Box,
    points: Iterable[Mapping[str, int]] = (),
    max_boxes: int = MAX_BOXES,
) -> dict[int, dict[str, int] | None]:
    """Which vectors attain the maximum somewhere on the box, each with a whole point where it does.

    A vector that is left out is provably never needed: wherever it attains the maximum another one does too. None instead of
    a point: within `max_boxes` boxes that could be neither proved nor refuted. `points` are tried first.
    """
    witnesses: dict[int, dict[str, int]] = {}
    open_: set[int] = set()

    def test(point: Mapping[str, int], among: Sequence[int]) -> None:
        found = values([vectors[i] for i in among], comparer.basis, point)
        witnesses.setdefault(among[found.index(max(found))], dict(point))

    everything = list(range(len(vectors)))
    for point in points:
        test(point, everything)
    queue: deque[tuple[Box, list[int], int]] = deque([(box, everything, 0)])
    looked = 0
    while queue:
        here, among, depth = queue.popleft()
        looked += 1
        among = [among[i] for i in prune([vectors[i] for i in among], comparer, here)]
        test({name: allowed.low for name, allowed in here}, among)
        if all(i in witnesses for i in among):
            continue
        if all(allowed.high is not None for _, allowed in here):
            test({name: int(allowed.high or 0) for name, allowed in here}, among)
        halves = _split(here, depth)
        if halves is None and all(allowed.low == allowed.high for _, allowed in here):
            continue  # a single point: `test` has its maximum
        if halves is None or looked + len(queue) >= max_boxes:
            open_.update(among)
            continue
        queue.extend((half, among, depth + 1) for half in halves)
    undecided = sorted(open_ - witnesses.keys())
    if undecided:
        certain = sorted(witnesses)[:MAX_CERTAIN]
        undecided = _not_blended(vectors, comparer, box, certain, undecided)
    return {i: witnesses.get(i) for i in everything if i in witnesses or i in undecided}


def _not_blended(
    vectors: Sequence[Vector], comparer: Comparer, box: Box, certain: Sequence[int], undecided: Sequence[int]
) -> list[int]:
    """Those of the undecided that on some part of the box are below no blend of two certain ones.

    The parts: every value of a symbol of few values (a cut), since which blend is above changes with it.
    """
    left: set[int] = set()
    for part in _values_apart(box):
        asked = [i for i in undecided if i not in left]
        numbers = [*certain, *asked]
        projected = dict(zip(numbers, comparer.project([vectors[i] for i in numbers], part), strict=True))
        pairs = [(projected[i], projected[j]) for i, j in itertools.combinations(certain, 2)]
        left |= {i for i in asked if not any(_is_below_blend(projected[i], a, b) for a, b in pairs)}
    return [i for i in undecided if i in left]


def _values_apart(box: Box) -> list[Box]:
    """The box, or one for each value of its first symbol that has few."""
    for axis, (name, allowed) in enumerate(box):
        if allowed.high is not None and 1 < allowed.high - allowed.low < MAX_VALUES:
            values = (Range(value, value) for value in range(allowed.low, allowed.high + 1))
            return [(*box[:axis], (name, value), *box[axis + 1 :]) for value in values]
    return [box]


def _is_below_blend(p: Vector, a: Vector, b: Vector) -> bool:
    """Whether some t*a + (1-t)*b with 0 <= t <= 1 is at least p in every place: then p is nowhere above both a and b.

    So fall the points between the two ends of a backward pass, where gradients grow by as much a layer as activations go: they
    all cross where the ends cross, and no box however small tells them apart there.
    """
    low, high = Fraction(0), Fraction(1)
    for pk, ak, bk in zip(p, a, b, strict=True):
        step, rest = ak - bk, pk - bk  # t * step >= rest
        if step > 0:
            low = max(low, Fraction(rest, step))
        elif step < 0:
            high = min(high, Fraction(rest, step))
        elif rest > 0:
            return False
        if low > high:
            return False
    return True


def _split(box: Box, depth: int) -> tuple[Box, Box] | None:
    """Two halves along one axis, axes in turn, at a power of two near the middle of the logarithms; None for a single point."""
    for turn in range(len(box)):
        axis = (depth + turn) % len(box)
        name, allowed = box[axis]
        if allowed.high == allowed.low or allowed.low >= FAR:
            continue
        middle = _middle(allowed)
        halves = Range(allowed.low, middle), Range(middle + 1, allowed.high)
        return tuple((*box[:axis], (name, half), *box[axis + 1 :]) for half in halves)  # type: ignore[return-value]
    return None


def _middle(allowed: Range) -> int:
    """The end of the lower half: 2^k - 1, k in the middle of the logarithms, if that is inside; else the arithmetic middle."""
    if allowed.high is None:
        return (1 << (allowed.low.bit_length() + 4)) - 1
    power = (1 << ((allowed.low.bit_length() + allowed.high.bit_length()) // 2)) - 1
    return power if allowed.low <= power < allowed.high else (allowed.low + allowed.high) // 2


def segments(
    vectors: Sequence[Vector],
    comparer: Comparer,
    symbol: str,
    allowed: Range,
    fixed: Mapping[str, int],
    max_ranges: int = MAX_BOXES,
) -> list[tuple[Range, int]] | None:
    """The maximum along one symbol, the others fixed: ranges of it in order, each with the position of the vector attaining it.

    Exact for every whole number: a range is cut until one vector dominates there, at the last to a single number. A range
    without end is cut up to 2^40 and there decided by value. None where that takes more than `max_ranges` ranges, as it does
    for vectors that take turns at every step of a ceil or floor.
    """
    others = tuple((name, Range(value, value)) for name, value in fixed.items() if name != symbol)
    found: list[tuple[Range, int]] = []
    stack = [(allowed, list(range(len(vectors))))]
    looked = 0
    while stack:
        here, among = stack.pop()
        looked += 1
        if looked > max_ranges:
            return None
        among = [among[i] for i in prune([vectors[i] for i in among], comparer, (*others, (symbol, here)))]
        if len(among) > 1 and here.high != here.low and here.low < FAR:
            middle = _middle(here)
            stack += [(Range(middle + 1, here.high), among), (Range(here.low, middle), among)]
            continue
        at = values([vectors[i] for i in among], comparer.basis, {**fixed, symbol: here.low})
        best = among[at.index(max(at))]
        if found and found[-1][1] == best:
            found[-1] = (Range(found[-1][0].low, here.high), best)
        else:
            found.append((here, best))
    return found
