"""Context parallelism: one rank's part of every sequence, `context-parallel{degree=2 rotate=all-to-all}`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.size import Size, floor_div
from memir.ir.substitute import substituted
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.context import KERNELS, around_the_ring
from memir.parallel.mesh import check_axis
from memir.parallel.ring import Ring, Rotate
from memir.parallel.ulysses import with_divided_heads
from memir.rewrite.depths import lifted

SEQUENCE = "S"
_LEAST = 6  # layers of the smallest sample that the lifted program is read off


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The step on one rank, which has a part of each sequence; S is that of all ranks.

    method: `ring`, torch.distributed.tensor.experimental's context_parallel, or `ulysses`, DeepSpeed's DistributedAttention.
    rotate (ring): how keys and values go around (`set_rotate_method`). balance (ring): a rank has a part of the sequence's head
    and one of its tail; with it the ranks before the last one copy each attention's output. Attention is causal.
    """

    name: ClassVar[str] = "context-parallel"
    degree: int = 1
    rank: int = 0
    method: Literal["ring", "ulysses"] = "ring"
    rotate: Rotate = "all-gather"
    balance: bool = True

    def run(self, program: Program) -> Program:
        """The rank's program; unchanged for degree 1.

        UsageError: a rank that there is not, attention without a kernel or with a mask, options of the other method, heads
        that do not divide (ulysses). InconclusiveError: S is a number.
        """
        if not check_axis(program, self.name, self.degree):
            return program
        if not 0 <= self.rank < self.degree:
            raise UsageError(f"context-parallel: rank {self.rank} of {self.degree}", hint=f"ranks are 0 to {self.degree - 1}")
        if SEQUENCE not in program.dims:
            raise InconclusiveError("context-parallel: the sequence is a number, and a part of it cannot be told from others")
        flat = unroll(program) if has_repeats(program) else program
        new = lifted(program, lambda one, _: self._flat(one), _LEAST) if has_repeats(flat) else self._flat(flat)[0]
        parts = self.degree * (2 if self.method == "ring" and self.balance else 1)
        new = substituted(new, {SEQUENCE: floor_div(Size.of(SEQUENCE), self.degree)}, new.dims)
        domain = (*new.domain, f"{SEQUENCE} % {parts} == 0")
        return replace(new, domain=domain, mesh=(*program.mesh, (self.name, Size.of(self.degree))))

    def _flat(self, program: Program) -> tuple[Program, list[int]]:
        if self.method == "ring":
            return around_the_ring(program, Ring(self.degree, self.rank, self.rotate, self.balance))
        if self.rotate != "all-gather" or not self.balance:
            raise UsageError("context-parallel: rotate and balance are the ring's, not of method=ulysses")
        return with_divided_heads(program, self.degree, KERNELS)
