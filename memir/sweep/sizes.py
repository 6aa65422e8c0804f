"""The largest batch or sequence of one program that fits, from its formula.

Each piece of the peak is a polynomial in the size that is asked for (linear in B, at most quadratic in S), so the largest size
at which it stays within a budget is a division or a square root, and the smallest of these over all pieces is the largest size
whose *requested* bytes fit. The allocator's rounding moves that by a little: from there on exact allocated bytes decide. The
result fits and the next size does not. That nothing larger fits follows because no storage becomes smaller when the size grows
(`grows`), so no sum of live storages does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

from memir.analysis.domain import Range, ranges
from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.domain import bind_domain
from memir.ir.size import Gen, Size
from memir.ir.symbolic import formula_text
from memir.sweep.grid import Numbers, Point
from memir.sweep.pool import Holding
from memir.sweep.rounding import lower_bound, operators

FAR = 2**40  # no batch and no sequence is longer
GAP = 8192  # sizes that are looked through for the next one of a domain such as S % 64 == 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one program says: the least size of its domain, the largest that fits (None: none), and the next one of its domain
    (None: there is none).
    """

    sizes: Sizes
    least: int
    value: int | None
    next: int | None


class Sizes:
    """One program along `symbol` ("B" or "S"), the other one being `at`, against a budget in bytes."""

    def __init__(self, holding: Holding, symbol: str, at: int, budget: int, max_seq: int | None) -> None:
        self.holding, self.symbol, self.at, self.budget = holding, symbol, at, budget
        self._other = {**holding.fixed, "S" if symbol == "B" else "B": at}
        self._range = self._allowed(max_seq)

    def _allowed(self, max_seq: int | None) -> Range | None:
        """The bounds of the symbol's sizes; None where the program holds for none of them."""
        program = self.holding.program
        if not self.holding.is_readable:
            traced = self.holding.traced_at
            if traced is None or traced != self._point(traced[0 if self.symbol == "B" else 1]):
                return None
            return Range(*[traced[0 if self.symbol == "B" else 1]] * 2)
        if self.symbol == "B" and max_seq is not None and self.at > max_seq:
            return None
        limit = (f"S <= {max_seq}",) if self.symbol == "S" and max_seq is not None else ()
        try:
            return ranges([self.symbol], bind_domain((*program.domain, *limit), self._other, (self.symbol,)))[self.symbol]
        except UsageError:  # a condition that does not hold at `at`, or bounds without a size between them
            return None

    def _point(self, size: int) -> Point:
        return (size, self.at) if self.symbol == "B" else (self.at, size)

    @cached_property
    def least(self) -> int | None:
        """The least size for which the program holds."""
        return None if self._range is None else self._up(self._range.low)

    @cached_property
    def doubt(self) -> str:
        """Why no answer can be proven; "" if it can."""
        if self.holding.doubts:
            return "; ".join(self.holding.doubts)
        low = self.least or 1
        for size in _all_sizes(self.holding.program):
            if not grows(size, self.symbol, low, self._other):
                return f"a storage of {size} bytes is not proven to grow with {self.symbol}"
        return ""

    def is_valid(self, size: int) -> bool:
        """Whether the program holds for this size."""
        allowed = self._range
        return allowed is not None and size in allowed and self.holding.holds(self._point(size))

    def numbers(self, size: int) -> Numbers:
        """The bytes at a valid size."""
        return self.holding.grid.numbers([self._point(size)])[0]

    def formula(self, size: int) -> str:
        """The piece of the peak that is the largest at a valid size, as text that sympy parses."""
        place = self.numbers(size).place
        piece = next(piece for piece in self.holding.grid.pieces if piece.place == place)
        return formula_text(piece.size, self.holding.program.dims)

    def solve(self) -> Part:
        """The largest size that fits. Only where there is a `least` one and no `doubt`."""
        assert self.least is not None
        fits = self.least
        if self._allocated(fits) > self.budget:
            return Part(self, fits, None, fits)
        over: int | None = None
        step, trial = 1, self._down(self._root(self.budget), fits)
        while True:
            after = self._up(fits + 1)
            if after is None or after == over:
                return Part(self, self.least, fits, over)
            if trial <= fits or (over is not None and trial >= over):
                trial = after if over is None else max(self._down((fits + over) // 2, fits), after)
            allocated = self._allocated(trial)
            if allocated <= self.budget:
                fits, trial = trial, self._down(trial + step, trial)
                step *= 2
            else:
                over = trial
                rounding = allocated - self.numbers(trial).requested
                trial = self._down(self._root(self.budget - rounding), fits)

    def _allocated(self, size: int) -> int:
        return self.holding.grid.allocated([self._point(size)])[0]

    def _up(self, size: int) -> int | None:
        """The least valid size from here up."""
        top = self._top
        return next((n for n in range(size, min(size + GAP, top) + 1) if self.is_valid(n)), None)

    def _down(self, size: int, floor: int) -> int:
        """The largest valid size from here down, or `floor`."""
        start = min(size, self._top)
        return next((n for n in range(start, max(start - GAP, floor), -1) if self.is_valid(n)), floor)

    @property
    def _top(self) -> int:
        assert self._range is not None
        return FAR if self._range.high is None else self._range.high

    def _root(self, budget: int) -> int:
        """The largest size at which every piece, its generators taken at their lower bounds, is within the budget."""
        pieces = [piece.size.substitute(self._other) for piece in self.holding.grid.pieces]
        return min(root(*lower_bound(piece), self.symbol, budget, self._top) for piece in pieces)


def root(size: Size, divisor: int, symbol: str, budget: int, top: int) -> int:
    """The largest whole number n in 0..top with size(n)/divisor <= budget, for a size that grows with `symbol` alone.

    By division or square root up to degree 2; by bisection of the polynomial beyond, or where it has generators left.
    """
    terms = {monomial: c for monomial, c in size.terms if all(atom == symbol for atom, _ in monomial)}
    is_plain = len(terms) == len(size.terms)
    c, b, a = (terms.pop(((symbol, exponent),) if exponent else (), 0) for exponent in (0, 1, 2))
    c -= budget * divisor
    if not is_plain or terms or a < 0 or (a == 0 and b < 0):
        low, high = 0, top
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if size.evaluate({symbol: middle}) <= budget * divisor else (low, middle - 1)
        return low
    if a:
        return max(0, min((isqrt(max(b * b - 4 * a * c, 0)) - b) // (2 * a), top))
    if b:
        return max(0, min(-c // b, top))
    return top if c <= 0 else 0


def grows(size: Size, symbol: str, low: int, other: dict[str, int]) -> bool:
    """Whether a size is proven not to become smaller when `symbol` grows from `low` on, the symbols in `other` being numbers.

    With symbol = low + n no coefficient of a power of n is negative; a generator has to grow itself, and so have its factors.
    """
    bound = size.substitute({name: value for name, value in other.items() if name in size.symbols()})
    plain = Size((m, c) for m, c in bound.terms if not any(isinstance(atom, Gen) for atom, _ in m))
    shifted = plain.substitute({symbol: Size.of(symbol) + low})
    if any(c < 0 or e < 0 for m, c in shifted.terms for atom, e in m if atom == symbol):
        return False
    for monomial, c in bound.terms:
        if any(isinstance(atom, Gen) for atom, _ in monomial) and not (c > 0 and _factors_grow(monomial, symbol, low)):
            return False
    return True


def _factors_grow(monomial: tuple[tuple[str | Gen, int], ...], symbol: str, low: int) -> bool:
    for atom, exponent in monomial:
        if exponent < 0:
            return False
        if isinstance(atom, str):
            continue
        if atom.op in ("ceil", "floor") and not (atom.b.is_constant and atom.b.constant > 0):
            return False
        if not all(grows(part, symbol, low, {}) and (part.is_nonnegative or len(monomial) == 1) for part in (atom.a, atom.b)):
            return False
    return True


def _all_sizes(program: Program) -> set[Size]:
    """The bytes of every storage and of every operator's scratch."""
    found = {storage.nbytes for storage in program.storages if storage.device == "gpu"}
    return found | {op.scratch for phase in program.phases for op in operators(phase.ops)}
