"""Distributed methods over a model's widths: degrees that are symbols, and widths that a degree divides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Program
from memir.ir.domain import Condition
from memir.ir.multiples import multiples_of, over_parts, over_wholes
from memir.ir.size import ZERO, Size
from memir.pipeline import Pipeline

USUAL = (8, 4, 2, 16, 3, 6, 5, 7, 12, 32)  # ranks: the first of these that the model divides by
MOST = 257
TENSOR = "tensor-parallel"
DIVIDED = ("k", "a", "f", "V")  # widths that tensor parallelism divides: heads (of key-value heads where there are fewer), ...


@dataclass(frozen=True, slots=True)
class OnRanks:
    """A program over widths after the passes of distributed methods."""

    program: Program
    degrees: tuple[tuple[str, str, int], ...]  # symbol, meaning, the number that stands for it where values are shown


def on_ranks(passes: Pipeline, program: Program, env: Mapping[str, int], taken: Mapping[str, str]) -> OnRanks:
    """The program of one rank. `env` has the target's values; `taken` are the symbols that mean something, with what.

    UsageError: a degree with the name of another symbol, or one that does not divide the target's widths. InconclusiveError:
    what a pass cannot prove where widths are symbols.
    """
    symbols = symbols_of(passes)
    for symbol in symbols:
        if symbol in program.dims or (symbol in taken and symbol != "t"):
            meaning = taken.get(symbol, "a symbol of the model")
            raise UsageError(
                f"--parallel: the degree {symbol} has the name of {meaning}", hint="call it N, or t for tensor-parallel"
            )
    multiples = multiples_of(program)
    divisible = []
    for one in passes.passes:
        degree = getattr(one, "degree", None)
        if one.name != TENSOR or degree is None or not Size.of(degree).is_constant:
            continue
        number = Size.of(degree).constant
        for name in DIVIDED if number > 1 else ():
            if name in program.dims:
                _check_divides(name, env[name], number, taken)
                multiples[name] = multiples.get(name, 1) * number
                divisible.append(f"{name} % {number} == 0")
    parts = over_parts(program, multiples)
    try:
        new = passes.run(parts)
    except (UsageError, InconclusiveError):
        raise
    except MemirError as error:
        message = f"{passes.spec()} cannot be proved where the model's widths are symbols"
        raise InconclusiveError(
            message, where=error.message, hint="keep what is divided as a number:  --symbols B,S,L"
        ) from error
    new = over_wholes(new, multiples, parts, program)
    new = replace(new, domain=tuple(dict.fromkeys((*_without_implied(new.domain), *divisible))))
    axes = {str(degree): axis for axis, degree in new.mesh}
    found = []
    for symbol in symbols:
        value = _usual(new, env, symbol)
        found.append((symbol, f"ranks of {axes.get(symbol, 'a mesh axis')}", value))
        env = {**env, symbol: value}
    return OnRanks(new, tuple(found))


def symbols_of(passes: Pipeline) -> tuple[str, ...]:
    """The symbols among the options of the passes, in their order."""
    found: dict[str, None] = {}
    for one in passes.passes:
        for field in fields(one):  # type: ignore[arg-type]
            value = getattr(one, field.name)
            if isinstance(value, Size):
                found |= dict.fromkeys(sorted(value.symbols()))
    return tuple(found)


def with_degrees(text: str, env: Mapping[str, int]) -> str:
    """The text of passes with numbers for the symbols in it."""
    passes = []
    for one in Pipeline.parse(text).passes:
        known = {
            field.name: getattr(one, field.name).substitute(env)
            for field in fields(one)  # type: ignore[arg-type]
            if isinstance(getattr(one, field.name), Size)
        }
        passes.append(replace(one, **known))  # type: ignore[type-var]
    return Pipeline(tuple(passes)).spec()


def _check_divides(name: str, value: int, number: int, taken: Mapping[str, str]) -> None:
    if value % number:
        message = f"tensor-parallel: {value} {taken.get(name, name)} do not divide by degree {number}"
        divisors = ", ".join(str(n) for n in range(2, 65) if value % n == 0) or "none up to 64"
        raise UsageError(message, hint=f"degrees that do: {divisors}")


def _usual(program: Program, env: Mapping[str, int], symbol: str) -> int:
    conditions = [c for c in map(Condition.read, program.domain) if c is not None and symbol in c.symbols()]
    numbers: tuple[int, ...] = (*USUAL, *range(2, MOST))
    for value in numbers:
        if all(c.holds({**env, symbol: value}) is not False for c in conditions):
            return value
    raise UsageError(f"--parallel: no number of ranks {symbol} divides the model's widths")


def _without_implied(domain: tuple[str, ...]) -> list[str]:
    """The domain without divisibility that follows from other: t divides k*g where it divides k."""
    divided = {}
    for text in domain:
        condition = Condition.read(text)
        if condition is not None and condition.sign == "==" and condition.right is ZERO and len(condition.left.terms) == 1:
            divided[text] = condition
    kept = []
    for text in domain:
        one = divided.get(text)
        implied = one is not None and any(
            other is not one and other.modulus is one.modulus and _is_factor(other.left, one.left) for other in divided.values()
        )
        if not implied:
            kept.append(text)
    return kept


def _is_factor(small: Size, large: Size) -> bool:
    """Whether a product divides another, and is less."""
    (monomial, coefficient), (of, times) = small.terms[0], large.terms[0]
    exponents = dict(of)
    return small is not large and times % coefficient == 0 and all(exponents.get(a, 0) >= e for a, e in monomial)
