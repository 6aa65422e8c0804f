"""Tensor parallelism: matrix products split over ranks, `tensor-parallel{degree=8 sequence loss}`.

Attention is split by heads and the MLP by its width, column then row (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053,
section 3), embedding and head over the vocabulary. The memory is that of PyTorch's own implementation: `parallelize_module`
with ColwiseParallel and RowwiseParallel (torch/distributed/tensor/parallel/style.py), the collectives that DTensor runs, and
their copies. docs/distributed.md says where Megatron's differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from memir.ir.core import Program
from memir.ir.size import Size
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.mesh import check_axis
from memir.parallel.tensor.rank import one_rank
from memir.rewrite.depths import lifted

_LEAST = 4  # layers of the smallest sample that the lifted program is read off


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """`degree`: ranks, a number or a symbol (`degree=t`: the formulas have it, and the domain what it divides).

    `sequence`: norms and what lies between split products work on a part of the sequence (Korthikanti et al. 2022, arXiv
    2205.05198, section 4.2.2; SequenceParallel). `loss`: logits stay split over the vocabulary (`loss_parallel`).
    `placed_gradients`: gradients are placed as their parameters are where backward makes them, as under FSDP."""

    name: ClassVar[str] = "tensor-parallel"
    degree: Size | int = 1
    sequence: bool = False
    loss: bool = False
    placed_gradients: bool = False

    def run(self, program: Program) -> Program:
        """The program of one rank; unchanged for degree 1.

        UsageError: a degree below 1, heads, a width or a vocabulary that does not divide by it. InconclusiveError: nothing to
        split, an operator without a dimension rule that meets a split tensor, layers that do not repeat.
        """
        degree = Size.of(self.degree)
        if not check_axis(program, self.name, degree.constant if degree.is_constant else 2):
            return program
        if not has_repeats(program):
            return self._flat(program)[0]
        flat = unroll(program)
        if not has_repeats(flat):
            return self._flat(flat)[0]
        conditions: list[str] = []

        def rewrite(one: Program, _: object) -> tuple[Program, list[int]]:
            new, origins = self._flat(one)
            conditions[:] = new.domain
            return new, origins

        new = lifted(program, rewrite, _LEAST)
        return replace(
            new,
            dims=tuple(dict.fromkeys((*new.dims, *sorted(degree.symbols())))),
            domain=tuple(dict.fromkeys((*new.domain, *conditions))),
            mesh=(*program.mesh, (self.name, degree)),
        )

    def _flat(self, program: Program) -> tuple[Program, list[int]]:
        return one_rank(
            program, Size.of(self.degree), sequence=self.sequence, loss=self.loss, placed_gradients=self.placed_gradients
        )
