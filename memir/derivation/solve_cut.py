"""The smallest cut whose step fits a budget: a number, and the closed form of each range of the cut."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from memir.analysis.words import Unit
from memir.derivation.bounds import CUT, DEPTH
from memir.derivation.derive import Part, Quantity
from memir.derivation.layout import plain_style, size_text
from memir.derivation.step import MEANINGS
from memir.derivation.write_text import WIDTH, place_text
from memir.errors import UsageError
from memir.ir.size import Gen, Size


def smallest(quantities: Sequence[Quantity], budget: int) -> tuple[int | None, dict[int, int]]:
    """The smallest cut with at most `budget` bytes, the other symbols as the target has them; and every cut's bytes.

    `quantities` are one quantity in its ranges of the cut. None: no cut fits.
    """
    found: dict[int, int] = {}
    for quantity in quantities:
        env = quantity.shown.env | quantity.shown.hidden
        depth = env[DEPTH]
        if quantity.cuts is None:
            raise UsageError(f"--solve {CUT} is for a formula in the cut")
        for cut in range(depth + 1):
            if quantity.cuts.holds(cut, depth):
                at = {**env, CUT: cut}
                found[cut] = int(max(size.fraction(at) for size in quantity.every))
    return next((cut for cut in sorted(found) if found[cut] <= budget), None), found


def to_smallest_cut(quantities: Sequence[Quantity], budget: int, gpu: str) -> tuple[str, bool]:
    """The answer as text, and whether any cut fits."""
    cut, found = smallest(quantities, budget)
    unit, shown = Unit.of(budget), quantities[0].shown
    others = ", ".join(f"{name}={value}" for name, value in shown.env.items() if name != CUT)
    name = quantities[0].name
    lines = [f"{shown.step.name}: the smallest cut {CUT} ({MEANINGS[CUT]}) whose {name} fits {gpu}, at {others}"]
    if cut is None:
        least = min(found, key=lambda c: (found[c], c))
        lines.append(f"  none fits: the least is {CUT}={least}, {unit.text(found[least])} of {unit.text(budget)}")
    else:
        lines.append(f"  {CUT} = {cut}   {unit.text(found[cut])} of {unit.text(budget)}")
        lines += [f"  {CUT} = {cut - 1} takes {unit.text(found[cut - 1])}"] if cut else []
    for quantity in quantities:
        words = quantity.cuts.words() if quantity.cuts is not None else ""
        lines += ["", f"  where {words}:"]
        for part in quantity.parts:
            lines += _closed_form(part, quantity)
    lines += ["", "M is the memory in bytes. Requested bytes: what the allocator rounds and keeps is not counted."]
    return "\n".join(lines) + "\n", cut is not None


def _closed_form(part: Part, quantity: Quantity) -> list[str]:
    """`c = ceil((p0 - M) / p1)` with the coefficients over the other symbols, where the part falls with the cut."""
    constant, slope = Size(), Size()
    where = place_text(part)
    for monomial, coefficient in part.size.terms:
        factors = dict(monomial)
        if any(isinstance(a, Gen) and CUT in a.a.symbols() | a.b.symbols() for a in factors):
            return [f"    {where}: no closed form, {CUT} stands within a quotient"]
        rest = tuple((a, e) for a, e in monomial if a != CUT)
        term = Size(((rest, coefficient),))
        if factors.get(CUT, 0):
            slope = slope - term
        else:
            constant = constant + term
    style, env = plain_style(), quantity.shown.env | quantity.shown.hidden
    if slope.fraction(env) <= 0:
        formula, named = "fits where p0 <= M, which no cut here changes", [("p0", part.size)]
    else:
        formula, named = f"{CUT} = ceil((p0 - M) / p1)", [("p0", constant), ("p1", slope)]
    lines = [f"    {where}: {formula}"]
    for name, size in named:
        text = f"{name} = {size_text(size, env, style)}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="      ", subsequent_indent="          ", break_long_words=False)
    return lines
