"""Muon for the matrices of hidden layers (torch/optim/_muon.py), AdamW for embeddings, the head and what is no matrix.

One state of the parameter's type; the update is made orthogonal by five steps of Newton and Schulz in bf16
(`_zeropower_via_newtonschulz`), each with two square matrices of the shorter side and one of the parameter's size.
"""

from __future__ import annotations

from collections.abc import Sequence

from memir.errors import InconclusiveError
from memir.updates import adam
from memir.updates.choice import Choice, Update
from memir.updates.tape import Member, Tape, Tensor

STEPS = 5


def _is_matrix(member: Member) -> bool:
    return len(member.shape) == 2 and not (member.is_embedding or member.is_head)


def _rest(choice: Choice) -> Choice:
    """AdamW's, in the form that PyTorch takes by default."""
    return Choice("foreach" if choice.on_cuda else "for-loop", choice.on_cuda, decays=True)


def _states(tape: Tape, member: Member, choice: Choice) -> None:
    if _is_matrix(member):
        tape.keep(member, "momentum_buffer", member.shape, member.dtype)
    else:
        adam.ADAMW.states(tape, member, _rest(choice))


def _step(tape: Tape, members: Sequence[Member], choice: Choice) -> None:
    _matrices(tape, [m for m in members if _is_matrix(m)])
    others = [m for m in members if not _is_matrix(m)]
    if others:
        tape.source = adam.SOURCE
        adam.ADAMW.step(tape, others, _rest(choice))


def _matrices(tape: Tape, members: Sequence[Member]) -> None:
    for m in tape.each(members):
        buffer = m.states["momentum_buffer"]
        tape.run("aten.lerp_.Scalar", buffer, m.gradient)
        update = tape.make(m, "aten.lerp.Scalar", m.gradient, buffer, shape=m.shape, dtype=m.dtype)
        update = _orthogonal(tape, m, update)
        tape.run("aten.mul_.Tensor", m.parameter)
        tape.run("aten.add_.Tensor", m.parameter, update)


def _orthogonal(tape: Tape, member: Member, gradient: Tensor) -> Tensor:
    rows, columns = member.shape
    if not (rows.is_constant and columns.is_constant):
        raise InconclusiveError("Muon works on the shorter side of a matrix, and its sides are symbols", where=member.base)
    tall = rows.constant > columns.constant
    made = gradient
    if member.dtype != "bf16":
        made = tape.make(member, "aten._to_copy", gradient, shape=member.shape, dtype="bf16")
    if tall:
        made = _turned(tape, member, made)
    norm = tape.make(member, "aten.linalg_vector_norm", made, shape=(), dtype="bf16")
    clamped = tape.make(member, "aten.clamp", norm, shape=(), dtype="bf16")
    del norm
    tape.run("aten.div_.Tensor", made, clamped)
    del clamped
    short = (made.shape[0], made.shape[0])
    shape = made.shape
    for _ in range(STEPS):
        gram = tape.make(member, "aten.mm", made, _turned(tape, member, made), shape=short, dtype="bf16")
        change = tape.make(member, "aten.addmm", gram, gram, gram, shape=short, dtype="bf16")
        made = tape.make(member, "aten.addmm", made, change, made, shape=shape, dtype="bf16")
    return _turned(tape, member, made) if tall else made


def _turned(tape: Tape, member: Member, tensor: Tensor) -> Tensor:
    (rows, columns), (down, along) = tensor.shape, tensor.value.strides
    return tape.view(member, tensor, "aten.permute", (columns, rows), (along, down))


MUON = Update("torch/optim/_muon.py", _states, _step, forms=("for-loop",), decays=True)
