"""The smallest degree of parallelism whose step fits a budget: a number, and its closed form."""

from __future__ import annotations

import textwrap

from memir.analysis.domain import check
from memir.analysis.words import Unit
from memir.derivation.derive import Part, Quantity
from memir.derivation.layout import plain_style, size_text
from memir.derivation.step import Shown
from memir.derivation.write_text import WIDTH, place_text
from memir.errors import UsageError
from memir.ir.size import Gen, Size

MOST = 1 << 16  # ranks
AFTER = 512  # degrees that are tried one by one; then those of twice as many each time


def smallest(quantity: Quantity, symbol: str, budget: int) -> tuple[int | None, int, tuple[int, int] | None]:
    """(the smallest valid degree from 2 on whose bytes fit, its bytes, the valid degree before it and its bytes).

    None: none fits; then the bytes are the least that were seen.
    """
    shown, before, least = quantity.shown, None, None
    env = shown.env | shown.hidden
    degrees = [*range(2, AFTER), *(AFTER << n for n in range((MOST // AFTER).bit_length()))]
    for degree in degrees:
        at = {**env, symbol: degree}
        try:
            check(at, shown.header)
        except UsageError:
            continue
        nbytes = int(max(size.fraction(at) for size in quantity.every))
        least = nbytes if least is None else min(least, nbytes)
        if nbytes <= budget:
            return degree, nbytes, before
        before = degree, nbytes
    if least is None:
        raise UsageError(f"--solve {symbol}: the model's widths divide by no degree")
    return None, least, before


def to_smallest_degree(quantity: Quantity, symbol: str, budget: int, gpu: str) -> tuple[str, bool]:
    """The answer as text, and whether any degree fits."""
    value, nbytes, before = smallest(quantity, symbol, budget)
    shown, unit = quantity.shown, Unit.of(budget)
    others = ", ".join(f"{name}={number}" for name, number in shown.env.items() if name != symbol)
    meaning = shown.meanings.get(symbol, "")
    lines = [f"{shown.step.name}: the smallest {symbol} ({meaning}) whose {quantity.name} fits {gpu}, at {others}"]
    if value is None:
        lines.append(f"  none fits: the least is {unit.text(nbytes)} of {unit.text(budget)}")
    else:
        lines.append(f"  {symbol} = {value:,}   {unit.text(nbytes)} of {unit.text(budget)}")
        lines += [f"  {symbol} = {before[0]:,} takes {unit.text(before[1])}"] if before else []
    for part in quantity.parts:
        lines += ["", *_closed_form(part, symbol, shown)]
    lines += ["", "M is the memory in bytes of one rank. Requested bytes: what the allocator rounds and keeps is not counted."]
    return "\n".join(lines) + "\n", value is not None


def _closed_form(part: Part, symbol: str, shown: Shown) -> list[str]:
    """`N = ceil(c1 / (M - c0))` for c0 + c1/N, rounded up rows being taken as whole where N divides them."""
    size, rounded = _unrounded(part.size, symbol)
    where, coefficients = place_text(part), dict[int, Size]()
    for monomial, coefficient in size.terms:
        power = dict(monomial).get(symbol, 0)
        rest = tuple((a, e) for a, e in monomial if a != symbol)
        if any(isinstance(a, Gen) and symbol in a.a.symbols() | a.b.symbols() for a, _ in rest):
            return [f"  {where}: no closed form, {symbol} stands within a quotient"]
        coefficients[power] = coefficients.get(power, Size()) + Size(((rest, coefficient),))
    if set(coefficients) == {0}:
        return [f"  {where}: does not depend on {symbol}"]
    if not set(coefficients) <= {0, -1}:
        return [f"  {where}: no closed form, {symbol} has the powers {', '.join(map(str, sorted(coefficients)))}"]
    condition = f", where {symbol} divides {', '.join(rounded)}" if rounded else ""
    lines = [f"  {where}: {symbol} = ceil(c1 / (M - c0)){condition}"]
    for name, power in (("c1", -1), ("c0", 0)):
        text = f"{name} = {size_text(coefficients.get(power, Size()), shown.point, plain_style())}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="        ", break_long_words=False)
    return lines


def _unrounded(size: Size, symbol: str) -> tuple[Size, list[str]]:
    """The size with a/N for ceil(a/N), and the a that were rounded."""
    total, rounded = Size(), dict[str, None]()
    for monomial, coefficient in size.terms:
        term = Size.of(coefficient)
        for atom, exponent in monomial:
            if isinstance(atom, str) or not _is_share(atom, symbol):
                term = term * Size(((((atom, exponent),), 1),))
                continue
            rest = atom.b * Size.of(symbol) ** -1
            rounded[size_text(atom.a * rest**-1, dict.fromkeys(atom.a.symbols() | rest.symbols(), 1), plain_style())] = None
            term = term * (atom.a * atom.b**-1) ** exponent
        total = total + term
    return total, list(rounded)


def _is_share(gen: Gen, symbol: str) -> bool:
    """Whether it is ceil(a/N), or ceil(a/(b*N)) with a product b."""
    if gen.op != "ceil" or len(gen.b.terms) != 1 or symbol in gen.a.symbols():
        return False
    monomial, coefficient = gen.b.terms[0]
    return coefficient == 1 and dict(monomial).get(symbol) == 1
