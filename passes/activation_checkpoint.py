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
from memir.rewrite.reentrant import recomputed_reentrantly

_LEAST = 6  # layers, or groups of layers that repeat, of the smallest sample that the lifted program is read off


@dataclass(frozen=True, slots=True)
class ActivationCheckpoint:
    """What torch.utils.checkpoint around the layers makes of a step that was traced without it.

    policy: `full` wraps every layer; `every-n` each `every`-th one; `selective` wraps every layer and keeps the results of the
    opcodes in `save` (none given: what torchtitan keeps, of matrix products every second one).
    passed: storages that the layers are called with and never read, as Hugging Face passes position ids: a checkpoint holds its
    arguments whether they are read or not, and the program does not tell them.
    early_stop: recomputation ends with the last tensor that is saved, as by default in PyTorch.
    reentrant: use_reentrant=True: the layer runs without gradients, and again as a whole (memir/rewrite/reentrant.py).
    keywords: with reentrant, storages that the layers are called with by keyword, read or not: kept until the loss is let go.
    rng: the step runs on the CPU, where the random generator's state counts, 5,056 bytes a checkpoint.
    """

    name: ClassVar[str] = "activation-checkpoint"
    policy: Literal["full", "every-n", "selective"] = "full"
    every: int = 2
    save: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    early_stop: bool = True
    rng: bool = False
    reentrant: bool = False
    keywords: tuple[str, ...] = ()

    def run(self, program: Program) -> Program:
        """The program with checkpoints. UsageError where there is nothing to wrap, or something is wrapped already."""
        if self.every < 1:
            raise UsageError(f"every={self.every}: there is no such layer", hint="every=2 wraps each second layer")
        if self.reentrant and (self.policy == "selective" or not self.early_stop):
            option = "policy=selective" if self.policy == "selective" else "early-stop=false"
            raise UsageError(f"{option} is of checkpoints that are not reentrant", hint=f"leave out  reentrant  or  {option}")
        if self.keywords and not self.reentrant:
            raise UsageError("keywords= is for reentrant checkpoints", hint="the others hold all arguments alike: passed=")
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
        if self.reentrant:
            return recomputed_reentrantly(flow, stretches, passed=self.passed, keywords=self.keywords, generator=self.rng)
        if self.policy == "selective":
            stretches = selective(flow, stretches, self.save)
        return recomputed(flow, stretches, passed=self.passed, early_stop=self.early_stop, generator=self.rng)
