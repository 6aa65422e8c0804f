"""From numbers at several widths to polynomials in the widths.

A number that a model's code makes of its widths is, as a rule, one product of them: 4096*14336, 3*h, a*d/2. At widths that are
pairwise unlike, the ratios of its values tell which product it is, since no two products have the same ratios; what is left
over is its coefficient, which must be the same everywhere. Where one product does not do, sums of two and of three are solved
for ((a + 2*k)*d), and each must hold at more points than determine it. Rounding up is tried as a product with ceil(d/32).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, combinations_with_replacement

from memir.errors import MemirError
from memir.ir.size import ONE, Gen, Monomial, Size, ceil_div, floor_div

DEGREE = 3  # of a product of widths within one extent or one storage
ROUND_UP = (32, 64, 128)  # tiles of attention kernels that a head size is rounded up to
MOST_PARTS = 16  # a fraction of a width, such as the rotated part of a head, has no larger denominator
MOST = 1 << 20  # no coefficient of a sum is larger: larger ones are coincidences


class NotGeneralError(MemirError):
    """A number that is no polynomial in the widths, as far as was tried."""


@dataclass(frozen=True, slots=True)
class _Product:
    size: Size
    values: tuple[int, ...]  # at the points
    degree: int


class Coefficients:
    """Polynomials from values at the points, the first of which is the target's own."""

    def __init__(self, factors: Sequence[Size], points: Sequence[Mapping[str, int]]) -> None:
        """`factors` are what products are made of: the atoms, and what they make up that counts as one (heads, a = k*g)."""
        self.points = tuple(points)
        self._products = _products(factors, self.points)
        self._by_ratio: dict[tuple[Fraction, ...], _Product] = {}
        for product in self._products:
            self._by_ratio.setdefault(_ratios(product.values), product)
        self.of = lru_cache(maxsize=None)(self._of)
        self.size = lru_cache(maxsize=None)(self._size)

    def is_unique(self) -> bool:
        """Whether the points tell every product of at most two widths from every other."""
        seen: dict[tuple[Fraction, ...], list[Monomial]] = {}
        plain = [p for p in self._products if p.degree <= 2 and _is_plain(p.size)]
        for product in plain:
            ratios, monomials = _ratios(product.values), [monomial for monomial, _ in product.size.terms]
            if seen.setdefault(ratios, monomials) != monomials:
                return False
        return True

    def _of(self, values: tuple[int, ...]) -> Size:
        if all(value == values[0] for value in values):
            return Size.of(values[0])
        if all(values):
            product = self._by_ratio.get(_ratios(values))
            if product is not None:
                factor = Fraction(values[0], product.values[0])
                if factor.denominator <= MOST_PARTS:
                    return floor_div(product.size * factor.numerator, factor.denominator)
        found = self._sum(values)
        if found is None:
            at = ", ".join(map(str, values))
            raise NotGeneralError(f"a size is no polynomial in the widths: {at} at the widths traced")
        return found

    def _sum(self, values: tuple[int, ...]) -> Size | None:
        small = [p for p in self._products if p.degree <= 2]
        for terms in range(2, min(4, len(values))):
            among = small if terms == 2 else [p for p in small if _is_plain(p.size)]
            for group in combinations(among, terms):
                solved = _solve([p.values for p in group], values)
                if solved is None or any(not c or c.denominator != 1 or abs(c) > MOST for c in solved):
                    continue
                at = zip(*(p.values for p in group), values, strict=True)
                if all(sum(c * n for c, n in zip(solved, numbers, strict=False)) == numbers[-1] for numbers in at):
                    return sum((p.size * int(c) for c, p in zip(solved, group, strict=True)), start=Size())
        return None

    def _size(self, sizes: tuple[Size, ...]) -> Size:
        """The size over the widths that is `sizes[j]` at point j. NotGeneralError where there is none."""
        first = sizes[0]
        if all(size is first for size in sizes):
            return first
        columns = [_by_shape(size) for size in sizes]
        keys = sorted({key for column in columns for key in column}, key=repr)  # a term may be zero at some widths
        if any(_has_generator(columns, key) and not all(key in column for column in columns) for key in keys):
            raise NotGeneralError(f"a size changes its form with the widths: {', '.join(map(str, sizes))}")
        total = Size()
        for key in keys:
            terms = [column.get(key) for column in columns]
            coefficient = self.of(tuple(0 if term is None else term[1] for term in terms))
            monomials = [term[0] for term in terms if term is not None]
            total = total + coefficient * (
                self._monomial(monomials) if len(monomials) == len(terms) else Size(((monomials[0], 1),))
            )
        return total

    def _monomial(self, monomials: Sequence[Monomial]) -> Size:
        """One monomial over B and S, the numbers within its generators generalized too."""
        if all(monomial == monomials[0] for monomial in monomials):
            return Size(((monomials[0], 1),))
        result = ONE
        for factors in zip(*monomials, strict=True):
            atom, exponent = factors[0]
            if isinstance(atom, str):
                result = result * Size.of(atom) ** exponent
                continue
            generators = [a for a, _ in factors if isinstance(a, Gen)]
            a, b = (self.size(tuple(sides)) for sides in zip(*((g.a, g.b) for g in generators), strict=True))
            result = result * Size.of(Gen(atom.op, a, b)) ** exponent
        return result


def _by_shape(size: Size) -> dict[object, tuple[Monomial, int]]:
    """The terms of a size by their monomial, with generators known by their form only."""
    found: dict[object, tuple[Monomial, int]] = {}
    for monomial, coefficient in size.terms:
        key = tuple((atom if isinstance(atom, str) else _form(atom), exponent) for atom, exponent in monomial)
        if key in found:
            raise NotGeneralError(f"a size has two terms of one form: {size}")
        found[key] = (monomial, coefficient)
    return found


def _form(gen: Gen) -> tuple[object, ...]:
    def sides(size: Size) -> tuple[object, ...]:
        return tuple(
            tuple((atom if isinstance(atom, str) else _form(atom), exponent) for atom, exponent in monomial)
            for monomial, _ in size.terms
        )

    return (gen.op, sides(gen.a), sides(gen.b))


def _has_generator(columns: Iterable[Mapping[object, tuple[Monomial, int]]], key: object) -> bool:
    return any(isinstance(atom, Gen) for column in columns if key in column for atom, _ in column[key][0])


def _ratios(values: Sequence[int]) -> tuple[Fraction, ...]:
    return tuple(Fraction(value, values[0]) for value in values[1:])


def _is_plain(size: Size) -> bool:
    return all(isinstance(atom, str) for monomial, _ in size.terms for atom, _ in monomial)


def _products(factors: Sequence[Size], points: Sequence[Mapping[str, int]]) -> list[_Product]:
    """All products of up to DEGREE factors, 1 among them, and those in which the head size is rounded up; simple ones first."""
    found: list[_Product] = []
    seen: set[tuple[int, ...]] = set()
    for degree in range(DEGREE + 1):
        for chosen in combinations_with_replacement(factors, degree):
            size = ONE
            for factor in chosen:
                size = size * factor
            _add(size, degree, points, found, seen)
    head = Size.of("d")
    if head in factors:
        for step in ROUND_UP:
            for product in [p for p in found if p.degree <= 1 and _is_plain(p.size) and "d" not in p.size.symbols()]:
                _add(product.size * ceil_div(head, step), product.degree + 1, points, found, seen)
    return found


def _add(
    size: Size, degree: int, points: Sequence[Mapping[str, int]], found: list[_Product], seen: set[tuple[int, ...]]
) -> None:
    values = tuple(size.evaluate(point) for point in points)
    if values not in seen:
        seen.add(values)
        found.append(_Product(size, values, degree))


def _solve(columns: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """The coefficients c with sum(c[i] * columns[i][j]) = values[j] at the first points j that determine them, by Cramer's
    rule for two and three; None if none do."""
    for rows in combinations(range(len(values)), len(columns)):
        square = [[column[j] for j in rows] for column in columns]
        determinant = _determinant(square)
        if determinant:
            right = [values[j] for j in rows]
            return [Fraction(_determinant([*square[:i], right, *square[i + 1 :]]), determinant) for i in range(len(columns))]
    return None


def _determinant(rows: Sequence[Sequence[int]]) -> int:
    if len(rows) == 2:
        return rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0]
    a, b, c = rows
    return a[0] * (b[1] * c[2] - b[2] * c[1]) - a[1] * (b[0] * c[2] - b[2] * c[0]) + a[2] * (b[0] * c[1] - b[1] * c[0])
