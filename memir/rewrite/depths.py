"""The usual ways to lift a rewrite: over the depth, and over the depth and a cut.

Layers that repeat in groups of several (`L % 2 == 0`) are sampled a whole group apart, and a cut for each place in a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from memir.errors import InconclusiveError
from memir.ir.core import Program, Repeat
from memir.ir.domain import Condition
from memir.ir.unroll import bind
from memir.rewrite.lift import Axes, Rewrite, Span, lift

CUT = "k"  # the symbol of a cut, and its name in a rewrite's symbols
CUT_BESIDE_HEADS = "c"  # the same over widths, where k are the key-value heads
FIRST = 8  # groups of layers of the first sample over cuts
FIRST_CUT = 4
AROUND = 5  # groups more than what is cut off at one end: what runs before the next one, it, and enough to see them repeat
MANY = 4096  # layers; a domain that holds for none below is taken for empty


def depth_symbol(program: Program) -> str:
    """The symbol that counts the layers. InconclusiveError if several symbols count, or none."""
    counts = {s for phase in program.phases for op in phase.ops if isinstance(op, Repeat) for s in op.count.symbols()}
    if len(counts) != 1:
        what = ", ".join(sorted(counts)) or "none"
        raise InconclusiveError(
            f"a rewrite needs one number of repetitions that is a symbol, and there are: {what}",
            where=f"program @{program.name}",
        )
    return counts.pop()


def stride(program: Program) -> int:
    """How many layers repeat as a group: the distance between the depths that the program is valid for."""
    first, second = islice(_depths(program, 1), 2)
    return second - first


def cut_symbol(program: Program) -> str:
    """The name of the cut in the program's formulas: one that it does not have yet."""
    return CUT_BESIDE_HEADS if CUT in program.dims else CUT


def lifted(program: Program, rewrite: Rewrite, least: int) -> Program:
    """The rewrite over the depth, done at `least` layers or the next number that is valid, and a few more."""
    return lift(program, rewrite, depths(program, least)).program


def over_cuts(program: Program, rewrite: Rewrite, cut: int | None = None, symbol: str = CUT) -> Program:
    """The rewrite over the depth and the cut, `rewrite` being told the cut as env[symbol]; with `cut`, at that one."""
    place = 0 if cut is None else cut % stride(program)
    new = lift(program, rewrite, depths_and_cuts(program, place, symbol)).program
    return new if cut is None else bind(new, {symbol: cut})


def at_start(program: Program, rewrite: Rewrite, cut: int) -> Program:
    """The rewrite over the depth for one small cut."""
    return lift(program, rewrite, from_start(program, cut)).program


def at_end(program: Program, rewrite: Rewrite, left: int) -> Program:
    """The rewrite over the depth for the cut that leaves so many layers trained."""
    return lift(program, rewrite, from_end(program, left)).program


def depths(program: Program, least: int) -> Span:
    """All depths, sampled from `least` layers on."""
    depth = depth_symbol(program)
    axes = Axes(((depth, next(_depths(program, least))),), (depth,), stride=stride(program))
    return Span(axes, program.dims, program.domain)


def depths_and_cuts(program: Program, place: int, symbol: str = CUT) -> Span:
    """All depths and the cuts at that `place` in a group of layers, `k % stride`; `symbol` is the cut's name."""
    depth, group = depth_symbol(program), stride(program)
    first = next(_depths(program, FIRST * group))
    axes = Axes(((depth, first), (symbol, FIRST_CUT * group + place)), (depth, symbol), stride=group)
    domain = program.domain if group == 1 else (*program.domain, f"{symbol} % {group} == {place}")
    return Span(axes, (*program.dims, symbol), domain)


def from_start(program: Program, cut: int) -> Span:
    """All depths for a small cut."""
    return depths(program, cut + AROUND * stride(program))


def from_end(program: Program, left: int, symbol: str = CUT) -> Span:
    """All depths, each at the cut that leaves so many layers trained."""
    depth, group = depth_symbol(program), stride(program)
    first = next(_depths(program, left + AROUND * group))
    axes = Axes(((depth, first), (symbol, first - left)), (depth,), ((symbol, depth),), group)
    return Span(axes, program.dims, program.domain)


def _depths(program: Program, least: int) -> Iterator[int]:
    """The numbers of layers from `least` on that the program is valid for."""
    depth = depth_symbol(program)
    conditions = [c for text in program.domain if (c := Condition.read(text)) is not None and c.symbols() == {depth}]
    for number in range(least, MANY):
        if all(c.holds({depth: number}) for c in conditions):
            yield number
    raise InconclusiveError(f"the program holds for too few values of {depth}", where=f"program @{program.name}")
