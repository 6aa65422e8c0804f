"""Sizes: polynomials with integer coefficients over symbols such as B (batch), S (sequence) and L (depth).

A `Size` is a number of bytes or an extent. Internally it is a sorted tuple of (monomial, coefficient), interned, so that
equality is identity and arithmetic is plain dictionary work; sympy is needed only for solving and output
(`memir.ir.symbolic`). A monomial is a sorted tuple of (atom, exponent). An atom is the name of a symbol or a `Gen`:
a named generator for what is not a polynomial (`ceil(a/b)`, `floor(a/b)`, `max(a,b)`, `min(a,b)`, `pow2(a)`). Exponents of
symbols may be negative (a shard `B*S/t` is `B*S*t^-1`). Symbols stand for positive integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Union

Atom = Union[str, "Gen"]
Monomial = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True, slots=True)
class Gen:
    """A non-polynomial generator: `op` is ceil or floor (of a/b), max or min (of a and b), pow2 (a's next power of two).

    Make one through `ceil_div`, `floor_div`, `max_of`, `min_of`, `pow2_of` or `Size.of`, which bring it to its canonical form.
    """

    op: str
    a: Size
    b: Size

    def fraction(self, env: Mapping[str, int]) -> Fraction:
        """The exact value where `env` gives every symbol's; max and min of shards need not be whole."""
        a, b = self.a.fraction(env), self.b.fraction(env)
        if self.op in ("max", "min"):
            return max(a, b) if self.op == "max" else min(a, b)
        if self.op == "pow2":
            return Fraction(_next_power(math.ceil(a)))
        return Fraction(math.ceil(a / b) if self.op == "ceil" else math.floor(a / b))

    def evaluate(self, env: Mapping[str, int]) -> int:
        """The integer value; ValueError if it is not whole."""
        return _whole(self.fraction(env), self)

    def text(self, order: Sequence[str] = ()) -> str:
        """`ceil((S + 3)/64)`, `max(B*S, 4096)`; a divisor that is more than one factor stands in parentheses."""
        a, b = self.a.text(order), self.b.text(order)
        if self.op in ("max", "min"):
            return f"{self.op}({a}, {b})"
        if self.op == "pow2":
            return f"pow2({a})"
        numerator = a if len(self.a.terms) < 2 else f"({a})"
        return f"{self.op}({numerator}/{b if _is_factor(self.b) else f'({b})'})"


def _is_nonnegative_atom(atom: Atom) -> bool:
    return isinstance(atom, str) or (atom.a.is_nonnegative and atom.b.is_nonnegative)


def _is_positive_atom(atom: Atom) -> bool:
    """Whether an atom is at least 1 wherever every symbol is."""
    if isinstance(atom, str):
        return True
    if atom.op == "pow2":
        return True
    return atom.op == "ceil" and (atom.a - 1).is_nonnegative and atom.b.is_constant and atom.b.constant > 0


def _is_factor(size: Size) -> bool:
    """Whether the text of `size` is one factor, so that it may stand after a slash without parentheses."""
    if len(size.terms) != 1:
        return not size.terms
    monomial, coefficient = size.terms[0]
    return coefficient > 0 if not monomial else coefficient == 1 and len(monomial) == 1


@lru_cache(maxsize=4096)  # generators of generators are compared again and again
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
        """The one object for these terms, in any order; each monomial once and sorted, zero coefficients dropped."""
        kept = tuple([(m, c) for m, c in terms if c])
        found = cls._interned.get(kept)
        if found is None and len(kept) > 1:
            kept = tuple(sorted(kept, key=lambda t: _monomial_key(t[0])))
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
        if isinstance(value, Gen):
            return _canonical(value)
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
        if len(self.terms) == 1 and (exponent >= 0 or self.terms[0][1] == 1):
            monomial, coefficient = self.terms[0]
            return Size(((tuple((a, e * exponent) for a, e in monomial if exponent), coefficient ** max(exponent, 0)),))
        if exponent < 0:
            raise ValueError(f"cannot take the power {exponent} of {self}")
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
        """Whether it is a number."""
        return all(not m for m, _ in self.terms)

    @property
    def constant(self) -> int:
        """The coefficient of the empty monomial."""
        return next((c for m, c in self.terms if not m), 0)

    @property
    def is_nonnegative(self) -> bool:
        """Whether it is proven to be at least 0 wherever every symbol is at least 1; False does not mean that it is negative.

        The proof: with every symbol s written as 1 + s', no coefficient is negative. A generator counts as at least 0 where
        its arguments do, and ceil(a/b) as at least 1 where a is.
        """
        if all(c >= 0 and all(_is_nonnegative_atom(a) for a, _ in m) for m, c in self.terms):
            return True
        atoms = {a for m, _ in self.terms for a, _ in m}
        if any(e < 0 for m, _ in self.terms for _, e in m) or not all(map(_is_nonnegative_atom, atoms)):
            return False
        stand_in: dict[Atom, Size] = {}
        for number, atom in enumerate(sorted(atoms, key=_atom_key)):
            stand_in[atom] = Size.of(f"x{number}") + (1 if _is_positive_atom(atom) else 0)
        shifted = ZERO
        for monomial, coefficient in self.terms:
            term = Size.of(coefficient)
            for atom, exponent in monomial:
                term = term * stand_in[atom] ** exponent
            shifted = shifted + term
        return all(c >= 0 for _, c in shifted.terms)

    def symbols(self) -> frozenset[str]:
        """All symbols, also those inside generators."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom, _ in monomial:
                found |= {atom} if isinstance(atom, str) else atom.a.symbols() | atom.b.symbols()
        return frozenset(found)

    def fraction(self, env: Mapping[str, int]) -> Fraction:
        """The exact value where `env` gives every symbol's, whole or not; KeyError if one lacks."""
        total = Fraction(0)
        for monomial, coefficient in self.terms:
            term = Fraction(coefficient)
            for atom, exponent in monomial:
                term *= (Fraction(env[atom]) if isinstance(atom, str) else atom.fraction(env)) ** exponent
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
        parts: list[tuple[Size, int]] = []  # numerators and their whole-number denominators
        for monomial, coefficient in self.terms:
            numerator, denominator = Size.of(coefficient), 1
            for atom, exponent in monomial:
                if isinstance(atom, Gen):
                    base = Size.of(Gen(atom.op, atom.a.substitute(env), atom.b.substitute(env)))
                else:
                    base = Size.of(env.get(atom, atom))
                if exponent > 0:
                    numerator = numerator * base**exponent
                elif len(base.terms) != 1:
                    raise ValueError(f"cannot divide by {base} in {self}")
                else:
                    inner, factor = base.terms[0]
                    numerator = numerator * Size(((inner, 1),)) ** exponent
                    denominator *= factor**-exponent
            parts.append((numerator, denominator))
        common = math.lcm(*(d for _, d in parts))
        total = ZERO
        for numerator, denominator in parts:
            total = total + numerator * (common // denominator)
        return total.exact_div(common)

    def text(self, order: Sequence[str] = ()) -> str:
        """Printed with the factors in `order` (the program's dims), highest degree first: `8*B*S + 4*ceil(S/64)`."""
        if not self.terms:
            return "0"
        rank = {name: position for position, name in enumerate(order)}

        def key(item: tuple[Monomial, int]) -> tuple[int, list[tuple[int, int, tuple[int, str]]]]:
            return (-sum(e for _, e in item[0]), [(*_rank(a, rank), -e, _atom_key(a)) for a, e in _ordered(item[0], rank)])

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


def monomial_value(monomial: Monomial, env: Mapping[str, int]) -> int | Fraction:
    """A monomial's exact value where `env` gives every symbol's; KeyError if one lacks."""
    total: int | Fraction = 1
    for atom, exponent in monomial:
        if isinstance(atom, Gen):
            total *= _narrow(atom.fraction(env)) ** exponent if exponent > 0 else atom.fraction(env) ** exponent
        else:
            total *= env[atom] ** exponent if exponent > 0 else Fraction(env[atom]) ** exponent
    return total if isinstance(total, int) else _narrow(total)


def _narrow(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value


def _whole(value: Fraction, of: Size | Gen) -> int:
    if value.denominator != 1:
        raise ValueError(f"{of if isinstance(of, Size) else of.text()} is not a whole number there: {value}")
    return value.numerator


ZERO = Size()
ONE = Size.of(1)


@lru_cache(maxsize=65536)
def ceil_div(a: Size | int, b: Size | int) -> Size:
    """ceil(a/b); what divides exactly is taken out of the generator."""
    return _canonical(Gen("ceil", Size.of(a), Size.of(b)))


@lru_cache(maxsize=65536)
def floor_div(a: Size | int, b: Size | int) -> Size:
    """floor(a/b); what divides exactly is taken out of the generator."""
    return _canonical(Gen("floor", Size.of(a), Size.of(b)))


def max_of(a: Size | int, b: Size | int) -> Size:
    """The larger of two, kept as a generator unless both are numbers or equal."""
    return _canonical(Gen("max", Size.of(a), Size.of(b)))


def min_of(a: Size | int, b: Size | int) -> Size:
    """The smaller of two, kept as a generator unless both are numbers or equal."""
    return _canonical(Gen("min", Size.of(a), Size.of(b)))


def pow2_of(a: Size | int) -> Size:
    """The smallest power of two that is at least `a`, kept as a generator unless it is a number; 1 below 1."""
    return _canonical(Gen("pow2", Size.of(a), ONE))


def _next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _canonical(gen: Gen) -> Size:
    """The one form of a generator, so that equal ones are found equal. Symbols stand for positive integers."""
    if gen.op == "pow2":
        return Size.of(_next_power(gen.a.constant)) if gen.a.is_constant else _generator("pow2", gen.a, ONE)
    return _extremum(gen) if gen.op in ("max", "min") else _quotient(gen.op, gen.a, gen.b)


def _extremum(gen: Gen) -> Size:
    """max and min: nested ones flattened, equal arguments and all but one number dropped, sorted, folded to the left."""
    arguments: set[Size] = set()
    numbers: list[int] = []
    waiting = [gen.a, gen.b]
    while waiting:
        size = waiting.pop()
        if (inner := _only_gen(size)) and inner.op == gen.op:
            waiting += [inner.a, inner.b]
        elif size.is_constant:
            numbers.append(size.constant)
        else:
            arguments.add(size)
    ordered = sorted(arguments, key=Size.text)
    if numbers:
        number = max(numbers) if gen.op == "max" else min(numbers)
        if gen.op == "min" or not any((size - number).is_nonnegative for size in ordered):
            ordered.append(Size.of(number))
    result = ordered[0]
    for size in ordered[1:]:
        result = _generator(gen.op, result, size)
    return result


def _only_gen(size: Size) -> Gen | None:
    """The generator that `size` is, if it is nothing else."""
    if len(size.terms) != 1 or size.terms[0][1] != 1 or len(size.terms[0][0]) != 1:
        return None
    atom, exponent = size.terms[0][0][0]
    return atom if isinstance(atom, Gen) and exponent == 1 else None


def _generator(op: str, a: Size, b: Size) -> Size:
    return Size(((((Gen(op, a, b), 1),), 1),))


def _quotient(op: str, a: Size, b: Size) -> Size:
    """ceil and floor: common factors cancelled, terms that the divisor divides taken out, numbers evaluated."""
    if not b.terms:
        raise ZeroDivisionError(f"{op}({a}/0)")
    if not a.terms:
        return ZERO
    divisor = math.gcd(*(c for _, c in a.terms), *(c for _, c in b.terms)) * (-1 if b.terms[0][1] < 0 else 1)
    shared = _common_monomial(a, b)
    a, b = a.exact_div(divisor) * shared**-1, b.exact_div(divisor) * shared**-1
    if len(b.terms) != 1:
        return ONE if a is b else _generator(op, a, b)
    monomial, coefficient = b.terms[0]
    whole: list[tuple[Monomial, int]] = []
    rest: list[tuple[Monomial, int]] = []
    for term, c in a.terms:
        left = _times(term, tuple((atom, -e) for atom, e in monomial))
        taken = 0
        if _is_integral(left) and (not monomial or not c % coefficient):
            taken = c // coefficient if not left else int(Fraction(c, coefficient))  # a constant's rest is not negative
        whole.append((left, taken))
        rest.append((term, c - taken * coefficient))
    taken_out, remainder = Size(whole), Size(rest)
    if taken_out.terms:
        return taken_out + _quotient(op, remainder, b)
    if a.is_constant and b.is_constant:
        return Size.of(Gen(op, a, b).evaluate({}))
    inner = _only_gen(a)
    if inner is not None and inner.op == op and b.is_constant and b.constant > 0:  # floor(floor(x)/n) = floor(x/n)
        return _quotient(op, inner.a, inner.b * b)
    if b.is_constant and all(_is_integral(m) for m, _ in a.terms):
        if op == "floor" and a.constant == coefficient - 1:  # floor((a + b - 1)/b) = ceil(a/b) for whole a
            return _quotient("ceil", a - a.constant, b)
        if op == "ceil" and a.constant == 1:  # ceil((a + 1)/b) = 1 + floor(a/b) for whole a
            return 1 + _quotient("floor", a - 1, b)
    return _generator(op, a, b)


def _is_integral(monomial: Monomial) -> bool:
    """Whether it is a whole number wherever the symbols are."""
    return all(
        e >= 0
        and (
            isinstance(a, str)
            or a.op in ("ceil", "floor", "pow2")
            or all(_is_integral(m) for s in (a.a, a.b) for m, _ in s.terms)
        )
        for a, e in monomial
    )


def _common_monomial(a: Size, b: Size) -> Size:
    """The largest monomial of symbols that divides every term of both, so that no negative exponent remains common."""
    names = {atom for size in (a, b) for monomial, _ in size.terms for atom, _ in monomial if isinstance(atom, str)}
    lowest = {n: min(dict(m).get(n, 0) for size in (a, b) for m, _ in size.terms) for n in names}
    return Size(((tuple(sorted((n, e) for n, e in lowest.items() if e)), 1),))
