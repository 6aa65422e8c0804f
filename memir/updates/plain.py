"""SGD, Adagrad and RMSprop (torch/optim/sgd.py, adagrad.py, rmsprop.py), their defaults, with momentum or weight decay.

Without weight decay and momentum SGD keeps nothing and makes nothing. Adagrad keeps a sum of squares, RMSprop a moving average
of them; the foreach forms hold the square roots of all parameters at once, and Adagrad's the scaled gradients too.
"""

from __future__ import annotations

from collections.abc import Sequence

from memir.updates.adam import count_steps, gradient_with_decay, gradients_with_decay
from memir.updates.choice import Choice, Update, by_dtype
from memir.updates.tape import Member, Tape


def _sgd_states(tape: Tape, member: Member, choice: Choice) -> None:
    if choice.momentum:
        tape.keep(member, "momentum_buffer", member.shape, member.dtype)


def _sgd(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    if choice.form == "for-loop":
        _sgd_loop(tape, members, choice)
        return
    for group in by_dtype(members):
        parameters = [m.parameter for m in group]
        buffers = [m.states["momentum_buffer"] for m in group] if choice.momentum else []
        if choice.form == "fused":
            tape.run("aten._fused_sgd_", parameters, [m.gradient for m in group], buffers)
            continue
        gradients = [m.gradient for m in group]
        gradients = gradients_with_decay(tape, group, choice)
        if choice.momentum:
            tape.run("aten._foreach_mul_.Scalar", buffers)
            tape.run("aten._foreach_add_.List", buffers, gradients)
            gradients = [*buffers]
        tape.run("aten._foreach_add_.List", parameters, gradients)


def _sgd_loop(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    for m in tape.each(members):
        gradient = m.gradient
        gradient = gradient_with_decay(tape, m, choice)
        if choice.momentum:
            buffer = m.states["momentum_buffer"]
            tape.run("aten.mul_.Tensor", buffer)
            tape.run("aten.add_.Tensor", buffer, gradient)
            gradient = buffer
        tape.run("aten.add_.Tensor", m.parameter, gradient)


def _adagrad_states(tape: Tape, member: Member, choice: Choice) -> None:
    tape.keep(member, "step", (), "f32", host=choice.host_steps)
    tape.keep(member, "sum", member.shape, member.dtype)


def _adagrad(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    if choice.form == "for-loop":
        _adagrad_loop(tape, members, choice)
        return
    for group in by_dtype(members):
        parameters, sums = [m.parameter for m in group], [m.states["sum"] for m in group]
        if choice.form == "fused":
            steps = [m.states["step"] for m in group]
            tape.run("aten._foreach_add_.Scalar", steps)
            tape.run("aten._fused_adagrad_", parameters, [m.gradient for m in group], sums, steps)
            continue
        gradients = [m.gradient for m in group]
        count_steps(tape, group, choice)
        gradients = gradients_with_decay(tape, group, choice)
        tape.run("aten._foreach_addcmul_.Scalar", sums, gradients, gradients)
        roots = tape.make_each(group, "aten._foreach_sqrt", sums)
        tape.run("aten._foreach_add_.Scalar", roots)
        if choice.decays:
            tape.run("aten._foreach_mul_.ScalarList", gradients)
            numerators = gradients
        else:
            numerators = tape.make_each(group, "aten._foreach_mul.ScalarList", gradients)
        tape.run("aten._foreach_addcdiv_.Scalar", parameters, numerators, roots)


def _adagrad_loop(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    for m in tape.each(members):
        gradient = m.gradient
        tape.run("aten.add_.Tensor", m.states["step"])
        gradient = gradient_with_decay(tape, m, choice)
        tape.run("aten.addcmul_", m.states["sum"], gradient, gradient)
        made = tape.make(m, "aten.sqrt", m.states["sum"], shape=m.shape, dtype=m.dtype)
        tape.run("aten.add_.Tensor", made)
        root = made
        del made
        tape.run("aten.addcdiv_", m.parameter, gradient, root)


def _rmsprop_states(tape: Tape, member: Member, choice: Choice) -> None:
    tape.keep(member, "step", (), "f32", host=choice.host_steps)
    tape.keep(member, "square_avg", member.shape, member.dtype)
    if choice.momentum:
        tape.keep(member, "momentum_buffer", member.shape, member.dtype)


def _rmsprop(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    if choice.form == "for-loop":
        _rmsprop_loop(tape, members, choice)
        return
    for group in by_dtype(members):
        parameters, averages = [m.parameter for m in group], [m.states["square_avg"] for m in group]
        gradients = [m.gradient for m in group]
        count_steps(tape, group, choice)
        gradients = gradients_with_decay(tape, group, choice)
        tape.run("aten._foreach_mul_.Scalar", averages)
        tape.run("aten._foreach_addcmul_.Scalar", averages, gradients, gradients)
        roots = tape.make_each(group, "aten._foreach_sqrt", averages)
        tape.run("aten._foreach_add_.Scalar", roots)
        if choice.momentum:
            buffers = [m.states["momentum_buffer"] for m in group]
            tape.run("aten._foreach_mul_.Scalar", buffers)
            tape.run("aten._foreach_addcdiv_.Scalar", buffers, gradients, roots)
            tape.run("aten._foreach_add_.List", parameters, buffers)
        else:
            tape.run("aten._foreach_addcdiv_.Scalar", parameters, gradients, roots)


def _rmsprop_loop(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    for m in tape.each(members):
        gradient = m.gradient
        tape.run("aten.add_.Tensor", m.states["step"])
        gradient = gradient_with_decay(tape, m, choice)
        tape.run("aten.mul_.Tensor", m.states["square_avg"])
        tape.run("aten.addcmul_", m.states["square_avg"], gradient, gradient)
        root = tape.make(m, "aten.sqrt", m.states["square_avg"], shape=m.shape, dtype=m.dtype)
        tape.run("aten.add_.Tensor", root)
        if choice.momentum:
            buffer = m.states["momentum_buffer"]
            tape.run("aten.mul_.Tensor", buffer)
            tape.run("aten.addcdiv_", buffer, gradient, root)
            tape.run("aten.add_.Tensor", m.parameter, buffer)
        else:
            tape.run("aten.addcdiv_", m.parameter, gradient, root)


SGD = Update("torch/optim/sgd.py", _sgd_states, _sgd)
ADAGRAD = Update("torch/optim/adagrad.py", _adagrad_states, _adagrad)
RMSPROP = Update("torch/optim/rmsprop.py", _rmsprop_states, _rmsprop, forms=("foreach", "for-loop"))
