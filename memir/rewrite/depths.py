"""The usual ways to lift a rewrite: over the depth, and over the depth and a cut."""

from __future__ import annotations

from memir.errors import InconclusiveError
from memir.ir.core import Program, Repeat
from memir.ir.unroll import bind
from memir.rewrite.lift import Axes, Rewrite, lift

CUT = "k"  # the symbol of a cut, and its name in a rewrite's symbols
FIRST = 8  # layers of the first sample over cuts
FIRST_CUT = 4


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


def lifted(program: Program, rewrite: Rewrite, least: int) -> Program:
    """The rewrite over the depth, done at `least` layers and a few more."""
    depth = depth_symbol(program)
    return lift(program, rewrite, Axes(((depth, least),), (depth,)), program.dims, program.domain)


def over_cuts(program: Program, rewrite: Rewrite, cut: int | None = None) -> Program:
    """The rewrite over the depth and the cut, `rewrite` being told the cut as env["k"]; with `cut`, at that one."""
    depth = depth_symbol(program)
    axes = Axes(((depth, FIRST), (CUT, FIRST_CUT)), (depth, CUT))
    new = lift(program, rewrite, axes, (*program.dims, CUT), program.domain)
    return new if cut is None else bind(new, {CUT: cut})


def at_end(program: Program, rewrite: Rewrite, left: int) -> Program:
    """The rewrite over the depth for the cut that leaves so many layers trained."""
    depth = depth_symbol(program)
    first = left + 5
    axes = Axes(((depth, first), (CUT, first - left)), (depth,), ((CUT, depth),))
    return lift(program, rewrite, axes, program.dims, program.domain)
