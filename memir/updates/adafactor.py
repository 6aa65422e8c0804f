"""Adafactor: torch.optim's (torch/optim/_adafactor.py) and transformers' (transformers/optimization.py), as its Trainer has it.

A matrix keeps a row and a column instead of second moments of every element; from them a matrix of the parameter's size is made
for its update. Shazeer and Stern 2018, arXiv 1804.04235. torch's runs as a for-loop by default, also on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

from memir.ir.layout import new_strides
from memir.ir.size import ONE, Size
from memir.updates.adam import count_steps
from memir.updates.choice import Choice, Update, by_dtype
from memir.updates.tape import Member, Tape, Tensor

_NORM = "aten.linalg_vector_norm"


def _row(shape: Sequence[Size]) -> tuple[Size, ...]:
    return (*shape[:-1], ONE)


def _column(shape: Sequence[Size]) -> tuple[Size, ...]:
    return (*shape[:-2], ONE, shape[-1])


def _one(shape: Sequence[Size]) -> tuple[Size, ...]:
    return (*shape[:-2], ONE, ONE)


def _product(shape: Sequence[Size]) -> str:
    return "aten.mm" if len(shape) == 2 else "aten.bmm"


def _states(tape: Tape, member: Member, choice: Choice) -> None:
    tape.keep(member, "step", (), "f32", host=choice.host_steps)
    if len(member.shape) > 1:
        tape.keep(member, "row_var", _row(member.shape), member.dtype)
        tape.keep(member, "col_var", _column(member.shape), member.dtype)
    else:
        tape.keep(member, "variance", member.shape, member.dtype)


def _step(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    if choice.form == "for-loop":
        _loop(tape, members)
        return
    groups = [group for same in by_dtype(members) for group in _split(same)]
    for group in groups:
        count_steps(tape, group, choice)
        for m in tape.each(group):
            tape.make(m, _NORM, m.parameter, shape=(), dtype=m.dtype)
        if len(group[0].shape) > 1:
            for name, shaped in (("row_var", _row), ("col_var", _column)):
                means = [tape.make(m, _NORM, m.gradient, shape=shaped(m.shape), dtype=m.dtype) for m in tape.each(group)]
                tape.run("aten._foreach_mul_.List", means, means)
                tape.run("aten._foreach_div_.ScalarList", means)
                tape.run("aten._foreach_lerp_.ScalarList", [m.states[name] for m in group], means)
                del means
            estimates = [
                tape.make(m, _product(m.shape), m.states["row_var"], m.states["col_var"], shape=m.shape, dtype=m.dtype)
                for m in tape.each(group)
            ]
            row_means = [
                tape.make(m, "aten.mean.dim", m.states["row_var"], shape=_one(m.shape), dtype=m.dtype) for m in tape.each(group)
            ]
            tape.run("aten._foreach_clamp_min_.Scalar", row_means)
            tape.run("aten._foreach_div_.List", estimates, row_means)
            del row_means
        else:
            squares = tape.make_each(group, "aten._foreach_mul.List", *[[m.gradient for m in group]] * 2)
            tape.run("aten._foreach_lerp_.ScalarList", [m.states["variance"] for m in group], squares)
            del squares
            estimates = [
                tape.make(m, "aten.clone", m.states["variance"], shape=m.shape, dtype=m.dtype) for m in tape.each(group)
            ]
        tape.run("aten._foreach_clamp_min_.Scalar", estimates)
        tape.run("aten._foreach_rsqrt_", estimates)
        tape.run("aten._foreach_mul_.List", estimates, [m.gradient for m in group])
        updates = estimates
        for k, m in enumerate(tape.each(group)):
            tape.make(m, _NORM, updates[k], shape=(), dtype=m.dtype)
        tape.run("aten._foreach_mul_.ScalarList", updates)
        tape.run("aten._foreach_add_.List", [m.parameter for m in group], updates)


def _split(members: Sequence[Member]) -> list[list[Member]]:
    """Matrices and vectors, whichever comes first (`_group_tensors_by_device_dtype_and_is_multidim`)."""
    groups: dict[bool, list[Member]] = {}
    for member in members:
        groups.setdefault(len(member.shape) > 1, []).append(member)
    return list(groups.values())


def _loop(tape: Tape, members: Sequence[Member]) -> None:
    for m in tape.each(members):
        tape.run("aten.add_.Tensor", m.states["step"])
        tape.make(m, _NORM, m.parameter, shape=(), dtype=m.dtype)
        if len(m.shape) > 1:
            row, column = m.states["row_var"], m.states["col_var"]
            row_mean = _squared_mean(tape, m, _row(m.shape))
            tape.run("aten.lerp_.Scalar", row, row_mean)
            column_mean = _squared_mean(tape, m, _column(m.shape))
            tape.run("aten.lerp_.Scalar", column, column_mean)
            estimate = tape.make(m, _product(m.shape), row, column, shape=m.shape, dtype=m.dtype)
            mean = tape.make(m, "aten.mean.dim", row, shape=_one(m.shape), dtype=m.dtype)
            tape.run("aten.clamp_", mean)
            tape.run("aten.div_.Tensor", estimate, mean)
            del mean
        else:
            squared = tape.make(m, "aten.mul.Tensor", m.gradient, m.gradient, shape=m.shape, dtype=m.dtype)
            tape.run("aten.lerp_.Scalar", m.states["variance"], squared)
            estimate = tape.make(m, "aten.clone", m.states["variance"], shape=m.shape, dtype=m.dtype)
        tape.run("aten.clamp_", estimate)
        tape.run("aten.rsqrt_", estimate)
        update = estimate
        tape.run("aten.mul_.Tensor", update, m.gradient)
        tape.make(m, _NORM, update, shape=(), dtype=m.dtype)
        tape.run("aten.add_.Tensor", m.parameter, update)


def _squared_mean(tape: Tape, member: Member, shape: Sequence[Size]) -> Tensor:
    mean = tape.make(member, _NORM, member.gradient, shape=shape, dtype=member.dtype)
    tape.run("aten.pow_.Scalar", mean)
    tape.run("aten.div_.Tensor", mean)
    return mean


# -- transformers'


def _trainer_states(tape: Tape, member: Member, choice: Choice) -> None:
    if len(member.shape) > 1:
        tape.keep(member, "exp_avg_sq_row", member.shape[:-1], "f32")
        tape.keep(member, "exp_avg_sq_col", (*member.shape[:-2], member.shape[-1]), "f32")
    else:
        tape.keep(member, "exp_avg_sq", member.shape, "f32")
    tape.keep(member, "RMS", (), "f32")


def _trainer_step(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    for m in tape.each(members):
        narrow = m.dtype in ("bf16", "f16")
        gradient = m.gradient
        if narrow:
            gradient = _wide(tape, m, m.gradient)
        weight = m.parameter
        if narrow:
            weight = _wide(tape, m, m.parameter)
        tape.replaced(m, "RMS", _rms(tape, m, weight))
        made = tape.make(m, "aten.pow.Tensor_Scalar", gradient, shape=m.shape, dtype="f32")
        update = tape.make(m, "aten.add.Tensor", made, shape=m.shape, dtype="f32")
        del made
        if len(m.shape) > 1:
            row, column = m.states["exp_avg_sq_row"], m.states["exp_avg_sq_col"]
            for state in (row, column):
                tape.run("aten.mul_.Tensor", state)
                mean = tape.make(m, "aten.mean.dim", update, shape=state.shape, dtype="f32")
                tape.run("aten.add_.Tensor", state, mean)
                del mean
            update = _factored(tape, m, row, column)
            tape.run("aten.mul_.Tensor", update, gradient)
        else:
            second = m.states["exp_avg_sq"]
            tape.run("aten.mul_.Tensor", second)
            tape.run("aten.add_.Tensor", second, update)
            made = tape.make(m, "aten.rsqrt", second, shape=m.shape, dtype="f32")
            tape.run("aten.mul_.Tensor", made, gradient)
            update = made
            del made
        scale = tape.make(m, "aten.div.Tensor", _rms(tape, m, update), shape=(), dtype="f32")
        tape.run("aten.clamp_", scale)
        tape.run("aten.div_.Tensor", update, scale)
        del scale
        tape.run("aten.mul_.Tensor", update)
        tape.run("aten.add_.Tensor", weight, tape.make(m, "aten.neg", update, shape=m.shape, dtype="f32"))
        if narrow:
            tape.run("aten.copy_", m.parameter, weight)


def _wide(tape: Tape, member: Member, tensor: Tensor) -> Tensor:
    return tape.make(member, "aten._to_copy", tensor, shape=member.shape, dtype="f32")


def _rms(tape: Tape, member: Member, tensor: Tensor) -> Tensor:
    norm = tape.make(member, _NORM, tensor, shape=(), dtype="f32")
    return tape.make(member, "aten.div.Tensor", norm, shape=(), dtype="f32")


def _factored(tape: Tape, member: Member, row: Tensor, column: Tensor) -> Tensor:
    """`_approx_sq_grad`: the matrix of a row and a column."""
    mean = tape.make(member, "aten.mean.dim", row, shape=(*row.shape[:-1], ONE), dtype="f32")
    divided = tape.make(member, "aten.div.Tensor", row, mean, shape=row.shape, dtype="f32")
    del mean
    tape.run("aten.rsqrt_", divided)
    tall = (*row.shape, ONE)
    left = tape.view(member, divided, "aten.unsqueeze", tall, new_strides(tall))
    wide = (*column.shape[:-1], ONE, column.shape[-1])
    right = tape.make(
        member,
        "aten.rsqrt",
        tape.view(member, column, "aten.unsqueeze", wide, new_strides(wide)),
        shape=wide,
        dtype="f32",
    )
    del divided
    return tape.make(member, "aten.mul.Tensor", left, right, shape=member.shape, dtype="f32")


ADAFACTOR = Update("torch/optim/_adafactor.py", _states, _step, forms=("foreach", "for-loop"))
TRAINERS = Update("transformers/optimization.py", _trainer_states, _trainer_step, forms=("for-loop",))
