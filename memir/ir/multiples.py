"""Symbols as multiples: a program over d that is valid for multiples of 8, written over d/8, and back.

What divides a width, as the halves of a head in a rotary embedding or the ranks of tensor parallelism do, is exact there:
floor(d/2) is 4 times d/8. So a rewrite that has to know what a part of a tensor is can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.domain import Condition
from memir.ir.size import ZERO, Gen, Size, floor_div
from memir.ir.substitute import substituted


def multiples_of(program: Program) -> dict[str, int]:
    """The symbols that the domain wants to be multiples of a number: {"d": 8} for `d % 8 == 0`."""
    found = {}
    for text in program.domain:
        condition = Condition.read(text)
        if condition is None or condition.sign != "==" or condition.right is not ZERO or not condition.modulus.is_constant:
            continue
        symbol = next((name for name in program.dims if condition.left is Size.of(name)), None)
        if symbol is not None and condition.modulus is not ZERO:
            found[symbol] = condition.modulus.constant
    return found


def over_parts(program: Program, multiples: Mapping[str, int]) -> Program:
    """The program with `symbol` standing for a part of what it was: number * symbol, for each of the multiples."""
    new = substituted(program, {name: Size.of(name) * number for name, number in multiples.items()}, program.dims)
    domain = []
    for text in program.domain:
        condition = Condition.read(text)
        if condition is None or not condition.symbols() & multiples.keys():
            domain.append(text)
        elif condition.modulus is ZERO:
            domain.append(condition.substitute({n: Size.of(n) * number for n, number in multiples.items()}).text(program.dims))
    return replace(new, domain=tuple(domain))


def over_wholes(program: Program, multiples: Mapping[str, int], before: Program, original: Program) -> Program:
    """The program back over the symbols themselves.

    `before` is what `over_parts` made of `original`: conditions that came since are kept, the others are the original's.
    """
    back = _Back(multiples)
    known = set(before.domain)
    added = []
    for text in program.domain:
        if text not in known:
            condition = Condition.read(text)
            if condition is not None:
                sides = (back.size(s) for s in (condition.left, condition.modulus, condition.right))
                left, modulus, right = sides
                condition = Condition(left, modulus, condition.sign, right)
                text = condition.text(program.dims)
            added.append(text)
    return replace(
        program,
        domain=tuple(dict.fromkeys((*original.domain, *added))),
        storages=tuple(replace(s, nbytes=back.size(s.nbytes)) for s in program.storages),
        values=tuple(back.value(v) for v in program.values),
        phases=tuple(replace(phase, ops=tuple(back.op(op) for op in phase.ops)) for phase in program.phases),
    )


class _Back:
    def __init__(self, multiples: Mapping[str, int]) -> None:
        self.multiples = multiples
        self._sizes: dict[Size, Size] = {}

    def size(self, size: Size) -> Size:
        """The size with each symbol divided by its number; what is no whole number of terms then stays a quotient."""
        if not size.symbols() & self.multiples.keys():
            return size
        if size not in self._sizes:
            total, below = self.over(size)
            whole = all(coefficient % below == 0 for _, coefficient in total.terms)
            self._sizes[size] = total.exact_div(below) if whole else floor_div(total, below)
        return self._sizes[size]

    def over(self, size: Size) -> tuple[Size, int]:
        """(numerator, denominator), whose quotient the size is."""
        terms: list[tuple[Size, int]] = []
        for monomial, coefficient in size.terms:
            top, below = Size.of(coefficient), 1
            for atom, exponent in monomial:
                if isinstance(atom, Gen):
                    top = top * self.generator(atom) ** exponent
                elif exponent > 0:
                    top, below = top * Size.of(atom) ** exponent, below * self.multiples.get(atom, 1) ** exponent
                else:
                    top = top * Size.of(atom) ** exponent * self.multiples.get(atom, 1) ** -exponent
            terms.append((top, below))
        common = 1
        for _, below in terms:
            common = common * below // gcd(common, below)
        total = ZERO
        for top, below in terms:
            total = total + top * (common // below)
        return total, common

    def generator(self, gen: Gen) -> Size:
        """ceil(d/4) over eighths is ceil(d/32)."""
        if gen.op in ("ceil", "floor"):
            (a, below_a), (b, below_b) = self.over(gen.a), self.over(gen.b)
            return Size.of(Gen(gen.op, a * below_b, b * below_a))
        return Size.of(Gen(gen.op, self.size(gen.a), self.size(gen.b)))

    def value(self, value: Value) -> Value:
        return replace(
            value,
            shape=tuple(map(self.size, value.shape)),
            strides=tuple(map(self.size, value.strides)),
            offset=self.size(value.offset),
        )

    def op(self, op: Op | Repeat) -> Op | Repeat:
        if isinstance(op, Repeat):
            return replace(op, count=self.size(op.count), body=tuple(self.op(inner) for inner in op.body))
        return replace(op, results=tuple(self.value(r) for r in op.results), scratch=self.size(op.scratch))
