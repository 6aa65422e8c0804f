"""Sizes: polynomials with integer coefficients over symbols such as B (batch), S (sequence) and L (depth).

A `Size` is a number of bytes or an extent. Internally it is a sorted tuple of (monomial, coefficient), interned, so that
equality is identity and arithmetic is plain dictionary work; sympy is needed only for solving and output
(`memir.ir.symbolic`). A monomial is a sorted tuple of (atom, exponent). An atom is the name of a symbol or a `Gen`:
a named generator for what is not a polynomial (`ceil(a/b)`, `floor(a/b)`, `max(a,b)`, `min(a,b)`). Exponents of symbols may be negative
(a shard `B*S/t` is `B*S*t^-1`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Union

Atom = Union[str, "Gen"]
Monomial = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True, slots=True)
class Gen:
    """A non-polynomial generator: `op` is ceil or floor (of a/b), max or min (of a and b)."""

    op: str
    a: Size
    b: Size

    def evaluate(self, env: Mapping[str, int]) -> int:
        a, b = self.a.fraction(env), self.b.fraction(env)
        if self.op in ("max", "min"):
            return int(max(a, b) if self.op == "max" else min(a, b))
        quotient = a / b
        return -((-quotient.numerator) // quotient.denominator) if self.op == "ceil" else quotient.numerator // quotient.denominator

    def text(self, order: Sequence[str] = ()) -> str:
        if self.op in ("max", "min"):
            return f"{self.op}({self.a.text(order)}, {self.b.text(order)})"
        a, b = (s.text(order) if len(s.terms) < 2 else f"({s.text(order)})" for s in (self.a, self.b))
        return f"{self.op}({a}/{b})"


def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, atom) if isinstance(atom, str) else (1, atom.text())


def _monomial_key(monomial: Monomial) -> tuple[int, list[tuple[tuple[int, str], int]]]:
    return (-sum(e for _, e in monomial), [(_atom_key(a), -e) for a, e in monomial])


class Size:
    """An integer polynomial over symbols. Immutable and interned: `a is b` exactly when `a == b`."""

    __slots__ = ("__weakref__", "terms")
    terms: tuple[tuple[Monomial, int], ...]
    _interned: ClassVar[dict[tuple[tuple[Monomial, int], ...], Size]] = {}

    def __new__(cls, terms: Iterable[tuple[Monomial, int]] = ()) -> Size:
        kept = tuple(sorted(((m, c) for m, c in terms if c), key=lambda t: _monomial_key(t[0])))
        found = cls._interned.get(kept)
        if found is None:
            found = object.__new__(cls)
            object.__setattr__(found, "terms", kept)
            cls._interned[kept] = found
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Size is immutable")

    def __reduce__(self) -> tuple[type[Size], tuple[tuple[tuple[Monomial, int], ...]]]:
        return (Size, (self.terms,))

    @staticmethod
    def of(value: int | str | Size | Gen) -> Size:
        """The size of a number, a symbol's name or a generator."""
        if isinstance(value, Size):
            return value
        if isinstance(value, int):
            return Size((((), int(value)),))
        if isinstance(value, Gen) and value.a.is_constant and value.b.is_constant:
            return Size((((), value.evaluate({})),))
        return Size(((((value, 1),), 1),))

    def _as_dict(self) -> dict[Monomial, int]:
        return dict(self.terms)

    def __add__(self, other: Size | int) -> Size:
        other = Size.of(other)
        if not other.terms:
            return self
        total = self._as_dict()
        for monomial, coefficient in other.terms:
            total[monomial] = total.get(monomial, 0) + coefficient
        return Size(total.items())

    __radd__ = __add__

    def __neg__(self) -> Size:
        return Size((m, -c) for m, c in self.terms)

    def __sub__(self, other: Size | int) -> Size:
        return self + (-Size.of(other))

    def __rsub__(self, other: int) -> Size:
        return Size.of(other) - self

    def __mul__(self, other: Size | int) -> Size:
        if isinstance(other, int):
            return Size((m, c * other) for m, c in self.terms)
        total: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                product = _times(m1, m2)
                total[product] = total.get(product, 0) + c1 * c2
        return Size(total.items())

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> Size:
        if exponent < 0:
            if len(self.terms) != 1 or self.terms[0][1] != 1:
                raise ValueError(f"cannot take the power {exponent} of {self}")
            return Size(((tuple((a, e * exponent) for a, e in self.terms[0][0]), 1),))
        result = ONE
        for _ in range(exponent):
            result = result * self
        return result

    def exact_div(self, divisor: int) -> Size:
        """Division by an integer that divides every coefficient; ValueError otherwise."""
        if any(c % divisor for _, c in self.terms):
            raise ValueError(f"{divisor} does not divide {self}")
        return Size((m, c // divisor) for m, c in self.terms)

    @property
    def is_constant(self) -> bool:
        return all(not m for m, _ in self.terms)

    @property
    def constant(self) -> int:
        """The coefficient of the empty monomial."""
        return next((c for m, c in self.terms if not m), 0)

    def symbols(self) -> frozenset[str]:
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom, _ in monomial:
                found |= {atom} if isinstance(atom, str) else atom.a.symbols() | atom.b.symbols()
        return frozenset(found)

    def fraction(self, env: Mapping[str, int]) -> Fraction:
        total = Fraction(0)
        for monomial, coefficient in self.terms:
            term = Fraction(coefficient)
            for atom, exponent in monomial:
                term *= Fraction(env[atom] if isinstance(atom, str) else atom.evaluate(env)) ** exponent
            total += term
        return total

    def evaluate(self, env: Mapping[str, int]) -> int:
        """The integer value where `env` gives every symbol's; KeyError if one lacks, ValueError if it is not whole."""
        total = 0
        for monomial, coefficient in self.terms:
            term = coefficient
            for atom, exponent in monomial:
                if exponent < 0:
                    return _whole(self.fraction(env), self)
                term *= (env[atom] if isinstance(atom, str) else atom.evaluate(env)) ** exponent
            total += term
        return total

    def substitute(self, env: Mapping[str, Size | int]) -> Size:
        """Symbols replaced by sizes or numbers, also inside generators."""
        if not self.symbols() & env.keys():
            return self
        total = ZERO
        for monomial, coefficient in self.terms:
            term = Size.of(coefficient)
            for atom, exponent in monomial:
                if isinstance(atom, Gen):
                    base = Size.of(Gen(atom.op, atom.a.substitute(env), atom.b.substitute(env)))
                else:
                    base = Size.of(env.get(atom, atom))
                if exponent < 0 and base.is_constant:
                    term = term.exact_div(base.constant ** -exponent)
                else:
                    term = term * base**exponent
            total = total + term
        return total

    def text(self, order: Sequence[str] = ()) -> str:
        """Printed with the factors in `order` (the program's dims), highest degree first: `8*B*S + 4*ceil(S/64)`."""
        if not self.terms:
            return "0"
        rank = {name: position for position, name in enumerate(order)}

        def key(item: tuple[Monomial, int]) -> tuple[int, list[tuple[int, int, tuple[int, str]]]]:
            return (-sum(e for _, e in item[0]), [(*_rank(a, rank), -e, _atom_key(a)) for a, e in _ordered(item[0], rank)])  # type: ignore[misc]

        parts = []
        for monomial, coefficient in sorted(self.terms, key=key):
            factors = [
                (a if isinstance(a, str) else a.text(order)) + ("" if e == 1 else f"^{e}") for a, e in _ordered(monomial, rank)
            ]
            head = [] if abs(coefficient) == 1 and factors else [str(abs(coefficient))]
            parts.append(("-" if coefficient < 0 else "+", "*".join(head + factors)))
        first = ("-" if parts[0][0] == "-" else "") + parts[0][1]
        return first + "".join(f" {sign} {body}" for sign, body in parts[1:])

    def __str__(self) -> str:
        return self.text(("B", "S", "L"))

    def __repr__(self) -> str:
        return f"Size({self})"


def _rank(atom: Atom, rank: Mapping[str, int]) -> tuple[int]:
    return (rank.get(atom, len(rank)) if isinstance(atom, str) else len(rank) + 1,)


def _ordered(monomial: Monomial, rank: Mapping[str, int]) -> list[tuple[Atom, int]]:
    return sorted(monomial, key=lambda factor: (_rank(factor[0], rank), _atom_key(factor[0])))


def _times(a: Monomial, b: Monomial) -> Monomial:
    if not a:
        return b
    if not b:
        return a
    exponents: dict[Atom, int] = dict(a)
    for atom, exponent in b:
        exponents[atom] = exponents.get(atom, 0) + exponent
    return tuple(sorted(((atom, e) for atom, e in exponents.items() if e), key=lambda f: _atom_key(f[0])))


def _whole(value: Fraction, size: Size) -> int:
    if value.denominator != 1:
        raise ValueError(f"{size} is not a whole number there: {value}")
    return int(value)


ZERO = Size()
ONE = Size.of(1)


def ceil_div(a: Size | int, b: Size | int) -> Size:
    """ceil(a/b), kept as a generator unless it is a number or divides exactly."""
    return _div("ceil", Size.of(a), Size.of(b))


def floor_div(a: Size | int, b: Size | int) -> Size:
    """floor(a/b), kept as a generator unless it is a number or divides exactly."""
    return _div("floor", Size.of(a), Size.of(b))


def _div(op: str, a: Size, b: Size) -> Size:
    if b.is_constant and b.constant > 0 and not any(c % b.constant for _, c in a.terms):
        return a.exact_div(b.constant)
    return Size.of(Gen(op, a, b))


def max_of(a: Size | int, b: Size | int) -> Size:
    a, b = Size.of(a), Size.of(b)
    return a if a is b else Size.of(Gen("max", a, b))


def min_of(a: Size | int, b: Size | int) -> Size:
    a, b = Size.of(a), Size.of(b)
    return a if a is b else Size.of(Gen("min", a, b))
