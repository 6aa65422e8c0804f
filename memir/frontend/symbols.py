"""From PyTorch's symbolic integers to memir's sizes, and from its guards to the program's domain."""

from __future__ import annotations

from collections.abc import Mapping
from traceback import FrameSummary
from typing import Any

import sympy
import torch

from memir.errors import InconclusiveError
from memir.frontend.fake import Fake
from memir.frontend.origin import shown_path
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


class LostSymbolError(InconclusiveError):
    """The forward alone has turned a symbol into a number: the rest of the step need not be traced."""

    def __init__(self, fake: Fake) -> None:
        super().__init__("a size did not stay symbolic", where=specialization_site(fake))
        self.fake = fake


def _named(expr: Any, fake: Fake) -> str:
    """`S == 160` for PyTorch's `Eq(s49, 160)`."""
    named = expr.xreplace({symbol: sympy.Symbol(name) for symbol, name in fake.names.items()})
    return f"{named.lhs} == {named.rhs}"


def specialization_site(fake: Fake) -> str:
    """The line of whose code fixed a symbol: from the stack that PyTorch keeps with the guard."""
    for guard in fake.shape_env.guards:
        if isinstance(guard.expr, sympy.Eq):
            location = guard.sloc
            frame = location.framework_loc
            framework = f"{shown_path(frame.filename)}:{frame.lineno}" if isinstance(frame, FrameSummary) else frame or ""
            return " ".join(filter(None, (_named(guard.expr, fake), location.maybe_user_loc or framework)))
    return ""


LEAST = 2  # PyTorch takes sizes of 0 and 1 apart: a symbol stands for 2 or more


def never_negative(expr: sympy.Expr, lowest: Mapping[str, int]) -> bool:
    """Whether a polynomial is at least 0 wherever its symbols are at or above their lowest value: x = lowest + x' leaves no
    negative coefficient. False also where that does not show it."""
    symbols = sorted(expr.free_symbols, key=str)
    shifted = sympy.expand(expr.xreplace({s: s + lowest.get(str(s), LEAST) for s in symbols}))
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
        if not any(never_negative(other - argument, {}) for other in kept):
            kept = [other for other in kept if not never_negative(argument - other, {})] + [argument]
    return kept[0] if len(kept) == 1 else type(largest)(*kept)
