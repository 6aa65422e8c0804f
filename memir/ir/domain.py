"""The conditions under which a program is valid, read: `S <= 1024`, `S % 64 == 0`, `t divides B`.

A condition that is written in another way is kept as text and never decided.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from memir.errors import ParseError, UsageError
from memir.ir.cursor import Cursor
from memir.ir.size import ZERO, Size
from memir.ir.sizetext import read_size

_COMPARE: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_MOD = re.compile(r"[ \t]*(?:Mod|PythonMod)[ \t]*\(")
_SIGN = re.compile(r"[ \t]*(<=|>=|==|!=|<|>|divides\b)")
# What is tried for a symbol: small and odd numbers, powers of two, multiples of 128 that are no power of two.
_VALUES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 64, 96, 128, 256, 384, 512, 1000, 1024, 2048, 4096, 6144, 8192)


@dataclass(frozen=True, slots=True)
class Condition:
    """`left % modulus SIGN right`; a modulus of 0 means that there is none."""

    left: Size
    modulus: Size
    sign: str
    right: Size

    @staticmethod
    def read(text: str) -> Condition | None:
        """The condition that `text` spells; None if it is written in another way."""
        return _read(text)

    def symbols(self) -> frozenset[str]:
        """The symbols in it."""
        return self.left.symbols() | self.modulus.symbols() | self.right.symbols()

    def holds(self, env: Mapping[str, int]) -> bool | None:
        """Whether it holds there; None if `env` lacks a symbol."""
        if not self.symbols() <= env.keys():
            return None
        left = self.left.fraction(env)
        if self.modulus is not ZERO:
            modulus = self.modulus.fraction(env)
            if not modulus:
                return False
            left = left % modulus
        return _COMPARE[self.sign](left, self.right.fraction(env))

    def substitute(self, env: Mapping[str, Size | int]) -> Condition:
        """The condition with symbols replaced."""
        return Condition(self.left.substitute(env), self.modulus.substitute(env), self.sign, self.right.substitute(env))

    def text(self, dims: Sequence[str] = ()) -> str:
        """As it is written in a program."""
        left = self.left.text(dims)
        if self.modulus is not ZERO:
            left = f"{_operand(self.left, dims)} % {_operand(self.modulus, dims)}"
        return f"{left} {self.sign} {self.right.text(dims)}"


def widened(text: str, point: Mapping[str, int]) -> str:
    """The condition so that it holds at `point` too: a bound that lies next to it moves there, another that fails goes ("")."""
    condition = Condition.read(text)
    if condition is not None and condition.holds(point) is not False:
        return text
    name, operation, bound = [*text.split(" "), "", ""][:3]
    next_to = name in point and bound.isdigit() and abs(int(bound) - point[name]) == 1
    return f"{name} {operation} {point[name]}" if next_to and operation in ("<=", ">=") else ""


def bind_domain(domain: Iterable[str], env: Mapping[str, int], dims: Sequence[str]) -> tuple[str, ...]:
    """The conditions with symbols bound; those that now hold go. UsageError if one does not hold."""
    kept = []
    for text in domain:
        condition = Condition.read(text)
        if condition is None or not condition.symbols() & env.keys():
            kept.append(text)
            continue
        holds = condition.holds(env)
        if holds is False:
            given = ", ".join(f"{n}={env[n]}" for n in sorted(condition.symbols()))
            raise UsageError(f"the program is valid only for {text}, and was given {given}")
        if holds is None:
            try:
                kept.append(condition.substitute(env).text(dims))
            except ValueError:  # over a shard, B*t^-1 with t bound: it has no text form, and stays undecided
                kept.append(text)
    return tuple(kept)


def broken(domain: Iterable[str], env: Mapping[str, int]) -> str | None:
    """The first condition that these numbers break, None where none does. One that lacks a number is not broken."""
    read = ((text, Condition.read(text)) for text in domain)
    return next((text for text, condition in read if condition is not None and condition.holds(env) is False), None)


def is_readable(domain: Iterable[str]) -> bool:
    """Whether every condition can be decided."""
    return all(Condition.read(text) is not None for text in domain)


def points(symbols: Sequence[str], domain: Iterable[str], limit: int = 12, *, spread: bool = False) -> list[dict[str, int]]:
    """Up to `limit` places in the domain, always the same: small ones first, or with `spread` its ends first."""
    conditions = [c for c in map(Condition.read, domain) if c is not None]
    found: list[dict[str, int]] = []
    for env in itertools.islice(_candidates(symbols, conditions, spread), 4000):
        if env not in found and all(c.holds(env) is not False for c in conditions):
            found.append(env)
            if len(found) == limit:
                break
    return found


def _candidates(symbols: Sequence[str], conditions: Sequence[Condition], spread: bool) -> Iterator[dict[str, int]]:
    """Places to try: all symbols alike, then each with values of its own; conditions on one symbol are respected."""
    values: dict[str, list[int]] = {}
    for symbol in symbols:
        own = [c for c in conditions if c.symbols() == {symbol}]
        extra = {abs(size.constant) + d for c in own for size in (c.left, c.right, c.modulus) for d in (-1, 0, 1)}
        values[symbol] = [v for v in sorted({*_VALUES, *extra}) if v > 0 and all(c.holds({symbol: v}) for c in own)]
    if not all(values.values()):
        return
    ranks = list(range(max(map(len, values.values()), default=1)))
    for rank in [ranks[0], ranks[-1], *ranks[1:-1]] if spread else ranks:
        yield {s: v[min(rank, len(v) - 1)] for s, v in values.items()}
        yield {s: v[(rank * (position + 2) + position) % len(v)] for position, (s, v) in enumerate(values.items())}
    for chosen in itertools.product(*values.values()):
        yield dict(zip(symbols, chosen, strict=True))


def _operand(size: Size, dims: Sequence[str]) -> str:
    text = size.text(dims)
    return text if len(size.terms) < 2 and " " not in text and not text.startswith("-") else f"({text})"


def _left(cursor: Cursor) -> tuple[Size, Size]:
    """`a`, `a % m` or, as sympy prints it, `Mod(a, m)`."""
    if cursor.try_match(_MOD):
        left = read_size(cursor)
        cursor.expect(",")
        modulus = read_size(cursor)
        cursor.expect(")")
        return left, modulus
    left = read_size(cursor)
    return left, read_size(cursor) if cursor.sign("%") else ZERO


@lru_cache(maxsize=4096)
def _read(text: str) -> Condition | None:
    cursor = Cursor(text)
    try:
        left, modulus = _left(cursor)
        sign = cursor.take(_SIGN, "a comparison")
        right = read_size(cursor)
        cursor.end()
    except ParseError:
        return None
    if sign == "divides":
        return Condition(right, left, "==", ZERO) if modulus is ZERO and left is not ZERO else None
    return Condition(left, modulus, sign, right)
