"""From PyTorch's symbolic integers to memir's sizes, and from its guards to the program's domain."""

from __future__ import annotations

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
        if type(value) is int:
            size = self._cache.get(value)
            if size is None:
                size = self._cache[value] = Size.of(value)
            return size
        if isinstance(value, torch.SymInt):
            return self.of_expr(value.node.expr)
        return Size.of(int(value))

    def of_expr(self, expr: sympy.Expr) -> Size:
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
            user = str(location.user_loc or location.framework_loc or "")
            return f"{guard.expr}  {user}".strip()
    return ""


def domain_of(fake: Fake) -> tuple[str, ...]:
    """The guards that tracing left, as conditions over B and S such as `S <= 1024`, without those that always hold."""
    names = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in fake.names.items()}
    lowest = {name: 2 for name in fake.names.values()}  # PyTorch takes a size of 1 apart: the trace holds from 2 on
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


_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _condition(expr: Any) -> str:
    """A relation with the symbols on the left and a number on the right where that is possible."""
    if not isinstance(expr, sympy.core.relational.Relational):
        return str(expr)
    operation = {"==": "==", "!=": "!="}.get(expr.rel_op, expr.rel_op)
    difference = sympy.expand(expr.lhs - expr.rhs)
    constant, rest = difference.as_coeff_Add()
    if rest.is_number:
        return ""
    content = sympy.gcd_terms(rest).as_coeff_Mul()[0] if rest.is_polynomial() else sympy.Integer(1)
    if content < 0:
        operation = _FLIP.get(operation, operation)
    bound = -constant / content
    rest = sympy.expand(rest / content)
    if operation in ("<", ">"):  # integers: a strict bound is the next closed one
        bound = sympy.ceiling(bound) - 1 if operation == "<" else sympy.floor(bound) + 1
        operation += "="
    elif operation in ("<=", ">="):
        bound = sympy.floor(bound) if operation == "<=" else sympy.ceiling(bound)
    return f"{rest} {operation} {bound}"


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
