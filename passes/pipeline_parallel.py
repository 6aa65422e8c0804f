"""Pipeline parallelism: one rank's stages of the step, `pipeline-parallel{degree=4 stage=1 schedule=1f1b microbatches=8}`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.size import Size
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.assembly import Plan
from memir.parallel.mesh import check_axis
from memir.parallel.pipeline import check_input, rank_step
from memir.parallel.schedules import Schedule, actions, stages_of
from memir.parallel.split import balanced, given
from memir.parallel.stages import Stages
from memir.rewrite.cut import layers_of
from memir.rewrite.flow import Flow
from memir.rewrite.lift import LiftError


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """What torch.distributed.pipelining runs on rank `stage` of `degree`; B is then one micro-batch of `microbatches`.

    at: the first layer of each stage but the first; without it layers are balanced as torchtitan does it. a_rank: stages of a
    rank where a schedule interleaves. tied=copy: a parameter of two stages is there twice, as in Megatron; otherwise an error.
    outputs: `schedule.step` returns the outputs of all micro-batches (PyTorch's default; torchtitan's is not to).
    scale: gradients are divided by the micro-batches. gloo: the step runs on the CPU, where a finished send holds its tensor.
    """

    name: ClassVar[str] = "pipeline-parallel"
    degree: int = 1
    stage: int = 0
    schedule: Schedule = "1f1b"
    microbatches: int = 0  # 0: as many as there are ranks
    at: tuple[int, ...] = ()
    a_rank: int = 2
    tied: Literal["error", "copy"] = "error"
    outputs: bool = True
    scale: bool = True
    gloo: bool = False

    def run(self, program: Program) -> Program:
        """The rank's program; unchanged for degree 1.

        UsageError: a stage or split that there is not, a parameter of two stages, a step of several micro-batches.
        InconclusiveError: stages that pass on more than one hidden state. LiftError: a number of layers that is a symbol.
        """
        if not check_axis(program, self.name, self.degree):
            return program
        if not 0 <= self.stage < self.degree:
            message = f"pipeline-parallel: stage {self.stage} of {self.degree}"
            raise UsageError(message, hint=f"stages are 0 to {self.degree - 1}")
        if self.microbatches < 0 or self.a_rank < 1:
            raise UsageError("pipeline-parallel: microbatches and a-rank are positive numbers")
        flat = unroll(program) if has_repeats(program) else program
        if has_repeats(flat):
            hint = "give the number of layers first:  -p 'bind{L=32},pipeline-parallel...'"
            raise LiftError("pipeline-parallel: a stage has a number of layers, and theirs is a symbol", hint=hint)
        flow = Flow(flat)
        check_input(flow)
        many = self.microbatches or self.degree
        a_rank = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(self.schedule, self.a_rank)
        depth, total = layers_of(flow).depth, self.degree * a_rank
        cuts = given(self.at, depth, total) if self.at else balanced(depth, total)
        plan = Plan(
            stages_of(self.schedule, self.stage, self.degree, a_rank),
            self.schedule,
            actions(self.schedule, self.stage, self.degree, a_rank, many),
            many,
            self.outputs,
            self.scale,
            self.gloo,
        )
        if self.schedule == "zbv" and self.tied == "copy":
            message = "pipeline-parallel: zbv has the first and the last stage on one rank, and a copy of a parameter of both"
            raise InconclusiveError(message, hint="another schedule, or no tied embedding")
        new, _ = rank_step(Stages(flow, cuts, tied=self.tied == "copy"), plan)
        return replace(new, mesh=(*program.mesh, (self.name, Size.of(self.degree))))
