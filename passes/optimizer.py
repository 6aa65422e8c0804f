"""Optimizer: the step of another optimizer in place of the traced one, `optimizer{name=sgd}`, `optimizer{impl=fused}`.

The optimizer's phase depends on nothing but the parameters, their gradients and the states that belong to them, so it can be
written anew: `memir.updates` says operator by operator what each optimizer does and keeps. Clipping, and what happens after the
step, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.size import Size
from memir.updates.bitsandbytes import tables
from memir.updates.masters import updated
from memir.updates.parameters import Trained
from memir.updates.replacing import own_step, with_step
from memir.updates.table import chosen, found
from memir.updates.tape import Tape


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Which optimizer, in which form, and on what.

    name_: what `--optimizer` takes (docs/optimizers.md), or none.
    impl: foreach, fused or for-loop; default is what PyTorch takes on the target, or the form that the name says.
    dtype: the type of copies that are updated in the parameters' place (master weights), as Megatron-LM's
    Float16OptimizerWithFloat16Params keeps them; same: the parameters themselves.
    weight_decay: whether there is any, which torch's Adam, SGD, Adagrad and RMSprop add to a copy of the gradients.
    momentum: SGD and RMSprop keep a buffer.
    cpu: the step runs on the CPU, where the for-loop is the default form and nothing is paged.
    """

    name: ClassVar[str] = "optimizer"
    name_: str = "adamw"
    impl: Literal["default", "foreach", "fused", "for-loop"] = "default"
    dtype: Literal["same", "f32"] = "same"
    weight_decay: Literal["default", "yes", "no"] = "default"
    momentum: bool = False
    cpu: bool = False

    def run(self, program: Program) -> Program:
        """The program with that step; folded layers stay folded.

        UsageError for an unknown optimizer or form, and where there are no gradients; InconclusiveError where parameters or
        gradients cannot be told.
        """
        target = "cpu" if self.cpu else "cuda"
        tape, trained = Tape(target), Trained(program)
        if self.name_ == "none":
            if self.dtype != "same":
                raise UsageError("optimizer: without one there are no copies to update", hint="leave out dtype")
            return with_step(program, tape, [], trained)
        what, update = found(self.name_)
        decays = None if self.weight_decay == "default" else self.weight_decay == "yes"
        choice = chosen(what, update, self.impl, target, decays=decays, momentum=self.momentum)
        groups = trained.members(own_step(program))
        members = [m for group in groups for m in group]
        for name in tables(what, choice.on_cuda):
            tape.share(name, (Size.of(256),), "f32")
        if self.dtype != "same":
            return with_step(program, tape, members, trained, updated(tape, groups, update, choice))
        for member in members:
            update.states(tape, member, choice)
        tape.source = update.source
        for group in groups:
            update.step(tape, group, choice)
        return with_step(program, tape, members, trained)
