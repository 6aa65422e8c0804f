"""ZeRO as DeepSpeed does it, `zero{stage=2 degree=8}`: the step of one rank.

Stage 1 partitions optimizer states and the fp32 weights, stage 2 gradients too (Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", 2020, section 5). The rules are those of deepspeed/runtime/zero, version 0.19.

The step is to be traced as it is written for DeepSpeed: bf16 or f16 parameters and an optimizer of torch.optim; fp32 weights
and states are the pass's work. Which parameters a rank has is a matter of numbers, so the layers are rewritten one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.coordinator import Limits
from memir.parallel.mesh import check_axis
from memir.parallel.zero_gradients import Reduction
from memir.parallel.zero_states import partitioned_states
from memir.parallel.zero_weights import Weights, partitioned_weights
from memir.rewrite.flow import Flow
from memir.rewrite.lift import LiftError

_BUCKET = 500_000_000  # elements: deepspeed/runtime/zero/config.py, reduce_bucket_size


@dataclass(frozen=True, slots=True)
class Zero:
    """DeepSpeed's `zero_optimization` by its own names and defaults; sizes are elements. `rank`: whose step it is.

    overlap_comm: none is DeepSpeed's default, true with stage 3 only, where it changes no bytes. allgather_bucket_size changes
    none either: weights are gathered in place (`all_gather_into_tensor`); it is here so that a configuration can be taken over.
    """

    name: ClassVar[str] = "zero"
    stage: Literal["1", "2", "3"] = "2"
    degree: int = 1
    reduce_bucket_size: int = _BUCKET
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_param: bool = False
    rank: int = 0

    @property
    def axis(self) -> str:
        """Of the mesh: the stage belongs to its name."""
        return f"{self.name}-{self.stage}"

    def assumes(self) -> tuple[str, ...]:
        """What was taken for granted that changes bytes."""
        if self.degree == 1 or self.reduce_bucket_size != _BUCKET:
            return ()
        times = " twice, with overlap-comm" if self.overlap_comm and self.stage != "3" else ""
        return (f"zero: DeepSpeed's default reduce-bucket-size, {_BUCKET:,} elements{times}",)

    def run(self, program: Program) -> Program:
        """The step of one rank; the program itself for degree 1.

        UsageError for ranks that there are not, steps without gradients or optimizer. InconclusiveError for a symbolic number
        of layers and optimizers that do not work element by element.
        """
        if not check_axis(program, self.axis, self.degree):
            return program
        if not 0 <= self.rank < self.degree:
            raise UsageError(f"{self.name}: rank {self.rank} of {self.degree}", hint=f"a rank is 0 to {self.degree - 1}")
        if self.reduce_bucket_size < 1:
            raise UsageError(f"{self.name}: reduce-bucket-size={self.reduce_bucket_size} is no size")
        flat = unroll(program) if has_repeats(program) else program
        if has_repeats(flat):
            raise LiftError(
                f"{self.name}: what a rank has of the parameters is no formula over the number of layers",
                hint=f"give it first:  -p 'bind{{L=32}},{self.name}{{...}}'",
            )
        return self._flat(flat)

    def _flat(self, program: Program) -> Program:
        if self.stage == "3":
            weights = Weights(
                limits=Limits(self.prefetch_bucket_size, self.max_live_parameters, self.max_reuse_distance),
                persistence=self.param_persistence_threshold,
                bucket_size=self.reduce_bucket_size,
                sub_group_size=self.sub_group_size,
                contiguous=self.contiguous_gradients,
                scatter=self.reduce_scatter,
                offload_optimizer=self.offload_optimizer,
                offload_param=self.offload_param,
            )
            return partitioned_weights(Flow(program), self.axis, self.degree, weights)[0]
        if self.offload_param:
            raise UsageError(f"{self.name}: offload-param needs stage 3, parameters are whole in stage {self.stage}")
        reduction = Reduction(
            partition=self.stage == "2",
            bucket_size=self.reduce_bucket_size,
            overlap=bool(self.overlap_comm),
            contiguous=self.contiguous_gradients or self.offload_optimizer,
            scatter=self.reduce_scatter,
            rank=self.rank,
            offload=self.offload_optimizer,
        )
        return partitioned_states(Flow(program), self.axis, self.degree, reduction, robin=self.round_robin_gradients)[0]
