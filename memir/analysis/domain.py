"""The domain of a program's symbols as integer ranges: what the analyses may assume about B and S.

A program's `domain` is a list of conditions (`memir.ir.domain` reads them). Those that compare a multiple of one symbol with a
number become bounds; every other one (such as `t divides a`) only decides whether a point is in the domain. Leaving it out of
the ranges makes them larger: what is proved on them stays true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.domain import Condition
from memir.ir.size import ZERO, Size

_MIRROR = {"<=": ">=", ">=": "<=", "<": ">", ">": "<", "==": "=="}


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`; `high` None is without end."""

    low: int = 1
    high: int | None = None

    def __contains__(self, value: int) -> bool:
        return self.low <= value and (self.high is None or value <= self.high)


def ranges(symbols: Iterable[str], conditions: Iterable[str]) -> dict[str, Range]:
    """A range for each symbol: at least 1, narrowed by conditions that compare it with a number. UsageError if none is left."""
    found = dict.fromkeys(symbols, Range())
    for text in conditions:
        bound = _bound(text)
        if bound is None or bound[0] not in found:
            continue
        symbol, low, high = bound
        low = max(low, found[symbol].low)
        highs = [h for h in (high, found[symbol].high) if h is not None]
        found[symbol] = Range(low, min(highs) if highs else None)
        if highs and low > min(highs):
            raise UsageError(f"the program is valid for no value of {symbol}", where=f"its domain asks for {text}")
    return found


def program_ranges(program: Program) -> dict[str, Range]:
    """The range of every symbol among the program's dims."""
    return ranges(program.dims, program.domain)


def check(env: Mapping[str, int], program: Program) -> None:
    """UsageError if a dimension of the program has no value, one below 1, or one outside of its domain."""
    for symbol in program.dims:
        if symbol not in env:
            hint = "" if symbol in ("B", "S", "L") else f"a degree is a number here; in a program:  bind{{{symbol}=8}}"
            raise UsageError(f"no value is given for the symbol {symbol}", hint=hint)
        if env[symbol] < 1:
            raise UsageError(f"{symbol} must be a positive number, not {env[symbol]}")
    for text in program.domain:
        condition = Condition.read(text)
        if condition is not None and condition.holds(env) is False:
            given = ", ".join(f"{symbol}={env[symbol]}" for symbol in sorted(condition.symbols()))
            raise UsageError(f"the program is valid only for {text}, and was given {given}", hint=_nearest(condition, env))


def _nearest(condition: Condition, env: Mapping[str, int]) -> str:
    """The next values that divide, for `S % 6 == 0`; nothing for a condition of another form."""
    symbols = condition.left.symbols()
    if condition.sign != "==" or not condition.modulus.is_constant or condition.right is not ZERO or len(symbols) != 1:
        return ""
    (symbol,) = symbols
    if condition.left is not Size.of(symbol) or condition.modulus is ZERO:
        return ""
    number = condition.modulus.constant
    low = env[symbol] // number * number
    return f"{symbol}={low or number} or {symbol}={low + number}" if low else f"{symbol}={number}"


def domain_text(symbols: Sequence[str], conditions: Sequence[str]) -> tuple[str, ...]:
    """When a formula over these symbols holds: the program's conditions, and "X >= 1" where they say nothing about X."""
    read = (Condition.read(text) for text in conditions)
    named = {symbol for condition in read if condition is not None for symbol in condition.symbols()}
    return (*conditions, *(f"{symbol} >= 1" for symbol in symbols if symbol not in named))


def _bound(text: str) -> tuple[str, int, int | None] | None:
    """The symbol that a condition bounds, and its least and largest value; None for a condition of another form."""
    condition = Condition.read(text)
    if condition is None or condition.modulus is not ZERO or condition.sign not in _MIRROR:
        return None
    difference, sign = condition.left - condition.right, condition.sign
    terms = [(m, c) for m, c in difference.terms if m]
    if len(terms) != 1 or len(terms[0][0]) != 1:
        return None
    ((symbol, exponent),), factor = terms[0]
    if not isinstance(symbol, str) or exponent != 1:
        return None
    limit = -difference.constant  # factor * symbol SIGN limit
    if factor < 0:
        factor, limit, sign = -factor, -limit, _MIRROR[sign]
    least = -(-limit // factor) if sign in (">=", "==") else limit // factor + 1 if sign == ">" else 1
    most = limit // factor if sign in ("<=", "==") else -(-limit // factor) - 1 if sign == "<" else None
    return symbol, least, most
