"""Activation checkpointing: layers are computed again in backward, `activation-checkpoint{policy=every-n every=2}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.unroll import has_repeats, unroll
from memir.rewrite.depths import depth_symbol, lifted, stride
from memir.rewrite.flow import Flow
from memir.rewrite.lift import LiftError
from memir.rewrite.policies import every_layer, selective
from memir.rewrite.recompute import recomputed

_LEAST = 6  # layers, or groups of layers that repeat, of the smallest sample that the lifted program is read off


@dataclass(frozen=True, slots=True)
class ActivationCheckpoint:
    """What torch.utils.checkpoint(use_reentrant=False) around the layers makes of a step that was traced without it.

    policy: `full` wraps every layer; `every-n` each `every`-th one; `selective` wraps every layer and keeps the results of the
    opcodes in `save` (none given: what torchtitan keeps, of matrix products every second one).
    passed: storages that the layers are called with and never read, as Hugging Face passes position ids: a checkpoint holds its
    arguments whether they are read or not, and the program does not tell them.
    early_stop: recomputation ends with the last tensor that is saved, as by default in PyTorch.
    rng: the step runs on the CPU, where the random generator's state counts, 5,056 bytes a checkpoint.
    """

    name: ClassVar[str] = "activation-checkpoint"
    policy: Literal["full", "every-n", "selective"] = "full"
    every: int = 2
    save: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    early_stop: bool = True
    rng: bool = False

    def run(self, program: Program) -> Program:
        """The program with checkpoints. UsageError where there is nothing to wrap, or something is wrapped already."""
        if self.every < 1:
            raise UsageError(f"every={self.every}: there is no such layer", hint="every=2 wraps each second layer")
        if not has_repeats(program):
            return self._flat(program)[0]
        flat = unroll(program)
        if not has_repeats(flat):
            return self._flat(flat)[0]
        depth = depth_symbol(program)
        hint = f"give their number first:  -p 'bind{{{depth}=32}},{self.name}...'"
        try:
            return lifted(program, lambda one, _: self._flat(one), _LEAST * stride(program))
        except LiftError as error:
            raise InconclusiveError(f"the layers do not repeat any more: {error}", where=error.where, hint=hint) from error

    def _flat(self, program: Program) -> tuple[Program, list[int]]:
        flow = Flow(program)
        stretches = every_layer(flow, self.every if self.policy == "every-n" else 1)
        if self.policy == "selective":
            stretches = selective(flow, stretches, self.save)
        return recomputed(flow, stretches, passed=self.passed, early_stop=self.early_stop, generator=self.rng)
