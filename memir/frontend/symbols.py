"""From PyTorch's symbolic integers to memir's sizes, and from its guards to the program's domain."""

from __future__ import annotations

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
            return from_sympy(sympy.expand(expr.xreplace(names)))
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


def domain_of(fake: Fake) -> tuple[str, ...]:
    """The guards that tracing left, as conditions over B and S such as `S <= 1024`, without those that always hold."""
    names = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in fake.names.items()}
    lowest = dict.fromkeys(fake.names.values(), 2)  # PyTorch takes a size of 1 apart: the trace holds from 2 on
    conditions: list[str] = []
    for guard in fake.shape_env.guards:
        expr = guard.expr.xreplace(names)
        if expr in (sympy.true, True):
            continue
        text = _condition(expr)
        if text and text not in conditions:
            conditions.append(text)
    bounds = [f"{name} >= {value}" for name, value in lowest.items()]
    return tuple(_tightest(bounds + conditions))


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
