"""The largest value of one symbol whose peak fits a budget, as a number and, where there is one, in closed form.

Every piece of the peak is a polynomial in the symbol x. Of degree 1 it is c1*x + c0 <= M, so x = floor((M - c0)/c1); of degree
2 it takes a square root. The smallest over all pieces is the largest x, because no storage becomes smaller when x grows, which
is looked at first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from memir.analysis.domain import check
from memir.analysis.words import Unit
from memir.derivation.derive import Part, Quantity
from memir.derivation.layout import plain_style, size_text
from memir.derivation.step import Shown
from memir.derivation.write_text import WIDTH, place_text
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.size import Gen, Size

FAR = 2**40
GAP = 4096  # values that are looked through for the next one of a domain such as 8*a divides h


@dataclass(frozen=True, slots=True)
class Solution:
    """`value` None: not even the smallest value of the domain fits. `over` is the next value and its bytes."""

    symbol: str
    value: int | None
    nbytes: int | None
    over: tuple[int, int] | None


def solve(shown: Shown, quantity: Quantity, symbol: str, budget: int) -> Solution:
    """The largest valid value with `quantity` <= `budget` bytes, other symbols as the target has them.

    UsageError: no such symbol. InconclusiveError: something may shrink as it grows.
    """
    if symbol not in shown.env:
        raise UsageError(f"--solve: {symbol} is no symbol of the formula", hint=f"it has: {', '.join(shown.env)}")
    falling = shrinks(shown.program, symbol)
    if falling is not None:
        raise InconclusiveError(f"--solve {symbol}: a storage of {falling} bytes may shrink as {symbol} grows")

    def nbytes(value: int) -> int:
        env = {**shown.env, symbol: value}
        return int(max(size.fraction(env) for size in quantity.every))

    low, high = 0, 1
    while nbytes(high) <= budget and high < FAR:
        low, high = high, 2 * high
    if high >= FAR:
        raise UsageError(f"--solve: {symbol} does not matter for the {quantity.name}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes(middle) <= budget else (low, middle)
    value = next((n for n in range(low, max(low - GAP, 0), -1) if _valid(shown, symbol, n)), None)
    after = next((n for n in range(high, high + GAP) if _valid(shown, symbol, n)), None)
    over = None if after is None else (after, nbytes(after))
    return Solution(symbol, value, None if value is None else nbytes(value), over)


def _valid(shown: Shown, symbol: str, value: int) -> bool:
    try:
        check({**shown.env, symbol: value}, shown.program)
    except UsageError:
        return False
    return True


def shrinks(program: Program, symbol: str) -> Size | None:
    """A size of the program that is not proven to grow with the symbol; None where all are."""
    for storage in program.storages:
        for monomial, coefficient in storage.nbytes.terms:
            exponents = {a: e for a, e in monomial if not isinstance(a, Gen)}
            inside = any(_inside(a, symbol) for a, _ in monomial if isinstance(a, Gen))
            if (exponents.get(symbol, 0) < 0 or coefficient < 0 or inside) and symbol in storage.nbytes.symbols():
                return storage.nbytes
    return None


def _inside(gen: Gen, symbol: str) -> bool:
    """Whether the generator may fall when the symbol grows."""
    falls_below = symbol in gen.b.symbols()
    falls_above = any(c < 0 or dict(m).get(symbol, 0) < 0 for m, c in gen.a.terms if symbol in Size(((m, c),)).symbols())
    return gen.op not in ("max", "min") and (falls_below or falls_above)


def to_solution(shown: Shown, quantity: Quantity, symbol: str, budget: int, gpu: str) -> tuple[str, bool]:
    """The answer as text, and whether anything fits."""
    found = solve(shown, quantity, symbol, budget)
    unit = Unit.of(budget)
    others = ", ".join(f"{name}={value}" for name, value in shown.env.items() if name != symbol)
    meaning = shown.meanings.get(symbol, "")
    lines = [f"{shown.step.name}: the largest {symbol} ({meaning}) whose {quantity.name} fits {gpu}, at {others}"]
    if found.value is None:
        lines.append("  none fits" + (f": {symbol}={found.over[0]} takes {unit.text(found.over[1])}" if found.over else ""))
    else:
        lines.append(f"  {symbol} = {found.value:,}   {unit.text(found.nbytes or 0)} of {unit.text(budget)}")
    if found.value is not None and found.over is not None:
        lines.append(f"  {symbol} = {found.over[0]:,} takes {unit.text(found.over[1])}")
    for part in quantity.parts:
        lines += ["", *closed_form(part, symbol, shown.env)]
    lines += ["", "M is the memory in bytes. Requested bytes: what the allocator rounds and keeps is not counted", ""]
    lines[-1] = "(memir sweep --max-batch counts it)."
    return "\n".join(lines) + "\n", found.value is not None


def closed_form(part: Part, symbol: str, env: Mapping[str, int]) -> list[str]:
    """`B <= (M - c0)/c1` with the coefficients over the other symbols; why there is none otherwise."""
    style = plain_style()
    coefficients: dict[int, Size] = {}
    where = place_text(part)
    for monomial, coefficient in part.size.terms:
        factors = dict(monomial)
        power = factors.get(symbol, 0)
        rest = tuple((a, e) for a, e in monomial if a != symbol)
        if any(isinstance(a, Gen) and symbol in a.a.symbols() | a.b.symbols() for a, _ in rest):
            return [f"  {where}: no closed form, {symbol} stands within a ceiling"]
        coefficients[power] = coefficients.get(power, Size()) + Size(((rest, coefficient),))
    degree = max(coefficients)
    if degree == 0:
        return [f"  {where}: does not depend on {symbol}"]
    if degree > 2 or min(coefficients) < 0:
        return [f"  {where}: no closed form, {symbol} has degree {degree}"]
    formula = {
        1: f"{symbol} = floor((M - c0) / c1)",
        2: f"{symbol} = floor((sqrt(c1**2 + 4*c2*(M - c0)) - c1) / (2*c2))",
    }[degree]
    lines = [f"  {where}: {formula}"]
    for power in range(degree, -1, -1):
        text = f"c{power} = {size_text(coefficients.get(power, Size()), env, style)}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="        ", break_long_words=False)
    return lines
