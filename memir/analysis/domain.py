"""The domain of a program's symbols as integer ranges: what the analyses may assume about B and S.

A program's `domain` is a list of conditions as text ("S <= 1024"). Comparisons of one symbol with one number become bounds;
every other condition (such as "t divides a") is left out, which only makes the range larger: what is proved on it stays true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memir.errors import UsageError
from memir.ir.core import Program

_SYMBOL = r"[A-Za-z_]\w*"
_SIMPLE = re.compile(rf"\s*(?:(-?\d+)\s*(<=|<)\s*)?({_SYMBOL})\s*(?:(<=|<|>=|>|==|=)\s*(-?\d+))?\s*")
_REVERSED = re.compile(rf"\s*(-?\d+)\s*(>=|>|==|=)\s*({_SYMBOL})\s*")
_MIRROR = {">=": "<=", ">": "<", "==": "==", "=": "=="}


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
    for condition in conditions:
        for symbol, relation, number in _bounds(condition):
            if symbol not in found:
                continue
            low, high = found[symbol].low, found[symbol].high
            if relation in (">=", ">", "=="):
                low = max(low, number + (relation == ">"))
            if relation in ("<=", "<", "=="):
                limit = number - (relation == "<")
                high = limit if high is None else min(high, limit)
            if high is not None and low > high:
                raise UsageError(f"no value of {symbol} is left", where=f"the domain asks for {condition}")
            found[symbol] = Range(low, high)
    return found


def program_ranges(program: Program) -> dict[str, Range]:
    """The range of every symbol among the program's dims."""
    return ranges(program.dims, program.domain)


def check(env: Mapping[str, int], program: Program) -> None:
    """UsageError if a dimension has no value, or one outside of the program's domain."""
    for symbol, allowed in program_ranges(program).items():
        if symbol not in env:
            raise UsageError(f"no value is given for the symbol {symbol}")
        if env[symbol] not in allowed:
            conditions = [c for c in program.domain if re.search(rf"\b{symbol}\b", c)] or [f"{symbol} >= 1"]
            raise UsageError(
                f"{symbol}={env[symbol]} is outside of what this program is valid for",
                where=f"valid for {', '.join(conditions)}",
            )


def domain_text(symbols: Sequence[str], conditions: Sequence[str]) -> tuple[str, ...]:
    """When a formula over these symbols holds: the program's conditions, and "X >= 1" where they say nothing about X."""
    named = {symbol for condition in conditions for symbol in re.findall(_SYMBOL, condition)}
    return (*conditions, *(f"{symbol} >= 1" for symbol in symbols if symbol not in named))


def _bounds(condition: str) -> Iterable[tuple[str, str, int]]:
    match = _REVERSED.fullmatch(condition)
    if match:
        yield match[3], _MIRROR[match[2]], int(match[1])
        return
    match = _SIMPLE.fullmatch(condition)
    if match:
        low, relation, symbol, other, number = match.groups()
        if low is not None:
            yield symbol, ">=" if relation == "<=" else ">", int(low)
        if other is not None:
            yield symbol, "==" if other == "=" else other, int(number)
