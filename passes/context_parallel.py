"""Context parallelism: one rank's part of every sequence, `context-parallel{degree=2 rotate=all-to-all}`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.size import Size, floor_div
from memir.ir.substitute import substituted
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.context import around_the_ring
from memir.parallel.mesh import check_axis
from memir.parallel.ring import Ring, Rotate
from memir.rewrite.depths import lifted

SEQUENCE = "S"
_LEAST = 6  # layers of the smallest sample that the lifted program is read off


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """What torch.distributed.tensor.experimental's context_parallel makes of the step on one rank; S is that of all ranks.

    rotate: how keys and values go around (`set_rotate_method`). balance: a rank has a part of the sequence's head and one of
    its tail; with it the ranks before the last one copy each attention's output. Attention is causal.
    """

    name: ClassVar[str] = "context-parallel"
    degree: int = 1
    rank: int = 0
    rotate: Rotate = "all-gather"
    balance: bool = True

    def run(self, program: Program) -> Program:
        """The rank's program; unchanged for degree 1.

        UsageError: a rank that there is not, attention without a kernel or with a mask. InconclusiveError: S is a number.
        """
        if not check_axis(program, self.name, self.degree):
            return program
        if not 0 <= self.rank < self.degree:
            raise UsageError(f"context-parallel: rank {self.rank} of {self.degree}", hint=f"ranks are 0 to {self.degree - 1}")
        if SEQUENCE not in program.dims:
            raise InconclusiveError("context-parallel: the sequence is a number, and a part of it cannot be told from others")
        flat = unroll(program) if has_repeats(program) else program
        ring = Ring(self.degree, self.rank, self.rotate, self.balance)
        if has_repeats(flat):
            new = lifted(program, lambda one, _: around_the_ring(one, ring), _LEAST)
        else:
            new, _ = around_the_ring(flat, ring)
        parts = self.degree * (2 if self.balance else 1)
        new = substituted(new, {SEQUENCE: floor_div(Size.of(SEQUENCE), self.degree)}, new.dims)
        domain = (*new.domain, f"{SEQUENCE} % {parts} == 0")
        return replace(new, domain=domain, mesh=(*program.mesh, (self.name, Size.of(self.degree))))
