"""Expert parallelism: whole experts on each rank, tokens by all-to-all, `expert-parallel{degree=8}`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.size import Size
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.dispatch import divided_experts
from memir.parallel.mesh import check_axis
from memir.rewrite.lift import LiftError


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """What transformers.distributed.expert_parallel (`AllToAllEP`) makes of the step on one rank; B is that of the rank.

    load: the rows that the rank's experts get, over those that it sends. 1 is the balanced routing of the trace; the most is
    `degree`, when all tokens of all ranks go to this one.
    """

    name: ClassVar[str] = "expert-parallel"
    degree: int = 1
    load: int = 1

    def run(self, program: Program) -> Program:
        """The rank's program; unchanged for degree 1.

        UsageError: no stacked experts, experts that do not divide, a load beyond all tokens. InconclusiveError: experts that
        are not called as transformers' grouped ones are, a number of layers that is a symbol.
        """
        if not check_axis(program, self.name, self.degree):
            return program
        if not 1 <= self.load <= self.degree:
            raise UsageError(f"expert-parallel: load {self.load} of {self.degree}", hint="1, balanced, to degree, all tokens")
        flat = unroll(program) if has_repeats(program) else program
        if has_repeats(flat):
            hint = f"give it first:  -p 'bind{{L=32}},{self.name}{{...}}'"
            raise LiftError(f"{self.name}: layers are rewritten one by one, and their number is a symbol", hint=hint)
        new, _ = divided_experts(flat, self.degree, self.load)
        return replace(new, mesh=(*program.mesh, (self.name, Size.of(self.degree))))
