"""From PyTorch's symbolic integers to memir's sizes, and from its guards to the program's domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Any

import sympy
import torch

from memir.errors import InconclusiveError
from memir.frontend.fake import Fake
from memir.ir.size import Size
from memir.ir.symbolic import from_sympy


class SizeReader:
    """Turns an int or SymInt into a `Size` over B and S. Answers are cached by expression."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        self._cache: dict[Any, Size] = {}

    def __call__(self, value: Any) -> Size:
        """The size of an int or a SymInt. Raises InconclusiveError for one that depends on data."""
        if type(value) is int:
            size = self._cache.get(value)
            if size is None:
                size = self._cache[value] = Size.of(value)
            return size
        if isinstance(value, torch.SymInt):
            return self.of_expr(value.node.expr)
        return Size.of(int(value))

    def of_expr(self, expr: sympy.Expr) -> Size:
        """The size of an expression over PyTorch's symbols."""
        size = self._cache.get(expr)
        if size is None:
            size = self._cache[expr] = self._convert(expr)
        return size

    def _convert(self, expr: sympy.Expr) -> Size:
        names = {symbol: sympy.Symbol(name) for symbol, name in self._fake.names.items()}
        unknown = expr.free_symbols - names.keys()
        if unknown:
            raise InconclusiveError(f"a size depends on data: {expr}", where=", ".join(sorted(map(str, unknown))))
        try:
            return from_sympy(sympy.expand(expr.xreplace(names).replace(_is_max, _decided)))
        except ValueError as error:
            raise InconclusiveError(f"a size that memir cannot write down: {expr}", where=str(error)) from error


def specialized(fake: Fake) -> dict[str, int]:
    """Symbols that tracing turned into numbers: name -> value."""
    found = {}
    for symbol, name in fake.names.items():
        replaced = fake.shape_env.replacements.get(symbol)
        if replaced is not None and replaced.is_number:
            found[name] = int(replaced)
    return found


def specialization_site(fake: Fake) -> str:
    """The line of whose code fixed a symbol: from the stack that PyTorch keeps with the guard."""
    for guard in fake.shape_env.guards:
        if isinstance(guard.expr, sympy.Eq):
            location = guard.sloc
            user = str(location.maybe_user_loc or location.framework_loc or "")
            return f"{guard.expr}  {user}".strip()
    return ""


_LEAST = 2  # PyTorch takes sizes of 0 and 1 apart: a symbol stands for 2 or more


def _never_negative(expr: sympy.Expr, lowest: Mapping[str, int]) -> bool:
    """Whether a polynomial is at least 0 wherever its symbols are at or above their lowest value: x = lowest + x' leaves no
    negative coefficient. False also where that does not show it."""
    symbols = sorted(expr.free_symbols, key=str)
    shifted = sympy.expand(expr.xreplace({s: s + lowest.get(str(s), _LEAST) for s in symbols}))
    if not symbols:
        return bool(shifted.is_nonnegative)
    polynomial = shifted.as_poly(*symbols)
    return polynomial is not None and all(c.is_nonnegative for c in polynomial.coeffs())


def _is_max(expr: sympy.Expr) -> bool:
    return type(expr).__name__ == "Max"


def _decided(largest: sympy.Expr) -> sympy.Expr:
    """`Max(1, S - 1)`, as strides have it, is `S - 1` where S is at least 2."""
    kept: list[sympy.Expr] = []
    for argument in largest.args:
        if not any(_never_negative(other - argument, {}) for other in kept):
            kept = [other for other in kept if not _never_negative(argument - other, {})] + [argument]
    return kept[0] if len(kept) == 1 else type(largest)(*kept)


def domain_of(fake: Fake) -> tuple[str, ...]:
    """The guards that tracing left, as conditions over B and S such as `S <= 1024`, without those that always hold."""
    names = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in fake.names.items()}
    guards = [guard.expr.xreplace(names) for guard in fake.shape_env.guards]
    return conditions_of(guards, dict.fromkeys(fake.names.values(), _LEAST))


def conditions_of(guards: Iterable[Any], lowest: Mapping[str, int]) -> tuple[str, ...]:
    """Relations over B and S as conditions that `memir.ir.domain` reads; `lowest` are values that no symbol goes below."""
    relations = [r for r in map(_without_factors, guards) if r not in (sympy.true, True)]
    lowest = dict(lowest)
    exceptions = {text for text in map(_condition, relations) if " != " in text}
    for name in lowest:
        while f"{name} != {lowest[name]}" in exceptions:
            lowest[name] += 1
    conditions = [_condition(relation) for relation in relations if not _always_holds(relation, lowest)]
    bounds = [f"{name} >= {value}" for name, value in lowest.items()]
    return tuple(_tightest(bounds + [text for text in dict.fromkeys(conditions) if text]))


def _without_factors(relation: Any) -> Any:
    """`B*S - 2*B != 0` is `S - 2 != 0`: factors that are at least 1 go."""
    if not isinstance(relation, sympy.Ne) or relation.atoms(sympy.Mod) or not relation.lhs.is_polynomial():
        return relation
    factors = [f for f, _ in sympy.factor_list(relation.lhs - relation.rhs)[1] if not _never_negative(f - 1, {})]
    return sympy.Ne(sympy.Mul(*factors), 0) if factors else sympy.true


def _always_holds(relation: Any, lowest: Mapping[str, int]) -> bool:
    """Whether `a % m != 0` has 0 < a < m, or `a != b` has a < b or a > b, everywhere at and above `lowest`."""
    if not isinstance(relation, sympy.Ne):
        return False
    if type(relation.lhs).__name__ in ("Mod", "PythonMod"):
        value, modulus = relation.lhs.args
        return relation.rhs == 0 and _never_negative(value - 1, lowest) and _never_negative(modulus - value - 1, lowest)
    difference = relation.lhs - relation.rhs
    return _never_negative(difference - 1, lowest) or _never_negative(-difference - 1, lowest)


_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}


def _condition(expr: Any) -> str:
    """A relation as `memir.ir.domain` reads it, a number on the right where that is possible; "" if it says nothing."""
    if not isinstance(expr, sympy.core.relational.Relational):
        return str(expr)
    for side, other in ((expr.lhs, expr.rhs), (expr.rhs, expr.lhs)):
        if type(side).__name__ in ("Mod", "PythonMod") and other.is_number and expr.rel_op in ("==", "!="):
            value, modulus = side.args
            return f"{_text(value)} % {_text(modulus)} {expr.rel_op} {other}"
    difference = from_sympy(sympy.expand(expr.lhs - expr.rhs))
    constant = difference.constant
    rest = difference - constant
    if rest.is_constant:
        return ""
    operation, content = expr.rel_op, gcd(*(c for _, c in rest.terms))
    if next(c for _, c in rest.terms) < 0:
        operation, content = _FLIP[operation], -content
    rest, bound = rest.exact_div(content), Fraction(-constant, content)
    if operation in ("<", ">"):  # integers: a strict bound is the next closed one
        bound = Fraction(ceil(bound) - 1 if operation == "<" else floor(bound) + 1)
        operation += "="
    if operation in ("<=", ">="):
        bound = Fraction(floor(bound) if operation == "<=" else ceil(bound))
    if bound.denominator != 1:
        return "" if operation == "!=" else f"{(rest * bound.denominator).text(('B', 'S'))} {operation} {bound.numerator}"
    return f"{rest.text(('B', 'S'))} {operation} {bound}"


def _text(expr: sympy.Expr) -> str:
    size = from_sympy(sympy.expand(expr))
    return size.text(("B", "S")) if len(size.terms) < 2 else f"({size.text(('B', 'S'))})"


def _tightest(conditions: list[str]) -> list[str]:
    """Of the bounds on one symbol only the tightest; what says nothing is left out."""
    best: dict[tuple[str, str], int] = {}
    others: list[str] = []
    for text in conditions:
        left, _, rest = text.partition(" ")
        operation, _, right = rest.partition(" ")
        if left.isidentifier() and operation in ("<=", ">=") and right.lstrip("-").isdigit():
            bound = int(right)
            if (left, operation) not in best:
                best[left, operation] = bound
            best[left, operation] = (min if operation == "<=" else max)(best[left, operation], bound)
        elif left.isidentifier() and operation == "!=" and right in ("0", "1"):
            continue
        else:
            others.append(text)
    bounds = [f"{left} {operation} {bound}" for (left, operation), bound in best.items() if bound < 2**62]
    return bounds + sorted(others)
