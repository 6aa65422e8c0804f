"""Adam and AdamW (torch/optim/adam.py: `_single_tensor_adam`, `_multi_tensor_adam`, `_fused_adam`), without amsgrad.

Two states of the parameter's type and a step counter. AdamW decays the parameter in place; Adam with weight decay adds it to a
copy of the gradient. The foreach form holds the square roots of all second moments at once, the for-loop form two temporaries
of one parameter and the last one of the parameter before, the fused form none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from memir.updates.choice import Choice, Update, by_dtype
from memir.updates.tape import Member, Tape, Tensor

SOURCE = "torch/optim/adam.py"


def _states(tape: Tape, member: Member, choice: Choice) -> None:
    tape.keep(member, "step", (), "f32", host=choice.host_steps)
    tape.keep(member, "exp_avg", member.shape, member.dtype)
    tape.keep(member, "exp_avg_sq", member.shape, member.dtype)


def count_steps(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    """A list of step counters goes up by one; those in host memory by a tensor that is made for it."""
    steps = [m.states["step"] for m in members]
    if choice.host_steps or not choice.on_cuda:
        one = tape.scalar("one")
        tape.run("aten._foreach_add_.Tensor", steps, one)
    else:
        tape.run("aten._foreach_add_.Scalar", steps)


def gradients_with_decay(tape: Tape, members: Sequence[Member], choice: Choice) -> list[Tensor]:
    """The gradients of a list; with weight decay that is not decoupled a copy of each."""
    gradients = [m.gradient for m in members]
    if not choice.decays:
        return gradients
    return tape.make_each(members, "aten._foreach_add.List", gradients, [m.parameter for m in members])


def gradient_with_decay(tape: Tape, member: Member, choice: Choice) -> Tensor:
    """The gradient of one parameter, or its copy."""
    if not choice.decays:
        return member.gradient
    return tape.make(member, "aten.add.Tensor", member.gradient, member.parameter, shape=member.shape, dtype=member.dtype)


def _step(tape: Tape, members: Sequence[Member], choice: Choice, *, decoupled: bool) -> None:
    if choice.form == "foreach":
        _foreach(tape, members, choice, decoupled)
    elif choice.form == "fused":
        for group in by_dtype(members):
            tape.run("aten._foreach_add_.Scalar", [m.states["step"] for m in group])
            states = [[m.states[name] for m in group] for name in ("exp_avg", "exp_avg_sq", "step")]
            opcode = "aten._fused_adamw_" if decoupled else "aten._fused_adam_"
            tape.run(opcode, [m.parameter for m in group], [m.gradient for m in group], *states)
    else:
        _loop(tape, members, choice, decoupled)


def _foreach(tape: Tape, members: Sequence[Member], choice: Choice, decoupled: bool) -> None:
    for group in by_dtype(members):
        parameters = [m.parameter for m in group]
        first, second = ([m.states[name] for m in group] for name in ("exp_avg", "exp_avg_sq"))
        count_steps(tape, group, choice)
        if choice.decays and decoupled:
            tape.run("aten._foreach_mul_.Scalar", parameters)
            gradients = [m.gradient for m in group]
        else:
            gradients = gradients_with_decay(tape, group, choice)
        tape.run("aten._foreach_lerp_.Scalar", first, gradients)
        tape.run("aten._foreach_mul_.Scalar", second)
        tape.run("aten._foreach_addcmul_.Scalar", second, gradients, gradients)
        del gradients
        roots = tape.make_each(group, "aten._foreach_sqrt", second)
        tape.run("aten._foreach_div_.ScalarList", roots)
        tape.run("aten._foreach_add_.Scalar", roots)
        tape.run("aten._foreach_addcdiv_.ScalarList", parameters, first, roots)


def _loop(tape: Tape, members: Sequence[Member], choice: Choice, decoupled: bool) -> None:
    for m in tape.each(members):
        first, second = m.states["exp_avg"], m.states["exp_avg_sq"]
        gradient = m.gradient
        tape.run("aten.add_.Tensor", m.states["step"])
        if choice.decays and decoupled:
            tape.run("aten.mul_.Tensor", m.parameter)
        else:
            gradient = gradient_with_decay(tape, m, choice)
        tape.run("aten.lerp_.Scalar", first, gradient)
        tape.run("aten.mul_.Tensor", second)
        tape.run("aten.addcmul_", second, gradient, gradient)
        root = tape.make(m, "aten.sqrt", second, shape=m.shape, dtype=m.dtype)
        divided = tape.make(m, "aten.div.Tensor", root, shape=m.shape, dtype=m.dtype)
        del root
        tape.run("aten.add_.Tensor", divided)
        denominator = divided
        del divided
        tape.run("aten.addcdiv_", m.parameter, first, denominator)


ADAM = Update(SOURCE, _states, partial(_step, decoupled=False))
ADAMW = Update(SOURCE, _states, partial(_step, decoupled=True), decays=True)
