"""Vocabulary-parallel embeddings and cross entropy, as DTensor runs them.

A rank's rows of a table are looked up with the other ranks' indices set to 0, and their results to 0
(torch/distributed/tensor/placement_types.py, `_MaskPartial`: `_mask_tensor`, `_apply_mask`). The loss over logits that stay
divided is torch/distributed/tensor/parallel/loss.py: `_log_softmax`, `_nll_loss_forward`, `_nll_loss_and_log_softmax_backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dims import base_name
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.tensor.chains import Plan
from memir.parallel.tensor.names import suffixed
from memir.parallel.tensor.placements import Placed

_HALF = ("bf16", "f16")


@dataclass(slots=True)
class _Line:
    """Operators in a row, each with a tensor of its own, named after one value."""

    edit: Edit
    like: Op
    name: str
    ops: list[Op]

    def run(
        self, opcode: str, operands: Sequence[str], suffix: str, dtype: str, shape: tuple[Size, ...], *frees: Value
    ) -> Value:
        """One more operator; `frees` die after it."""
        name = suffixed(self.name, suffix)
        storage = self.edit.declare(Storage(name, product(shape) * ITEMSIZE[dtype], Kind.TEMPORARY))
        value = Value(name, dtype, shape, contiguous(shape), ZERO, storage)
        self._add(opcode, operands, value, frees)
        return value

    def write(self, opcode: str, operands: Sequence[str], into: Value, suffix: str, *frees: Value) -> Value:
        """One in place."""
        value = replace(into, name=suffixed(self.name, suffix))
        self._add(opcode, operands, value, frees)
        return value

    def _add(self, opcode: str, operands: Sequence[str], value: Value, frees: Sequence[Value]) -> None:
        gone = tuple(f.storage for f in frees)
        self.ops.append(replace(self.like, opcode=opcode, operands=tuple(operands), results=(value,), frees=gone))


def _line(edit: Edit, op: Op) -> _Line:
    plain = replace(op, frees=(), drops=(), saves=(), scratch=ZERO, results=())
    return _Line(edit, plain, op.results[0].name, [])


def _mask(line: _Line, indices: str, shape: tuple[Size, ...], suffix: str = "") -> tuple[Value, Value]:
    """The indices within this rank's rows, and which of them are not its own."""
    below = line.run("aten.lt.Scalar", (indices,), f"{suffix}.below", "bool", shape)
    above = line.run("aten.ge.Scalar", (indices,), f"{suffix}.above", "bool", shape)
    mask = line.run("aten.bitwise_or.Tensor", (below.name, above.name), f"{suffix}.mask", "bool", shape, below, above)
    copy = line.run("aten.clone", (indices,), f"{suffix}.copy", "i64", shape)
    moved = line.run("aten.sub.Tensor", (copy.name,), f"{suffix}.moved", "i64", shape, copy)
    return line.write("aten.index_put_", (moved.name, mask.name), moved, f"{suffix}.masked"), mask


def lookups(state: Placed, plan: Plan) -> None:
    """Masks around every lookup in a divided table."""
    tables = {x.table for x in plan.lookups}
    for position, op in enumerate(state.graph.flow.ops):
        if base_name(op.opcode) != "embedding" or op.operands[0] not in tables or not state.graph.flow.is_forward(position):
            continue
        now = state.edit.op(position)
        indices = state.graph.values[op.operands[1]]
        line = _line(state.edit, op)
        masked, mask = _mask(line, indices.name, indices.shape)
        state.edit.before(position, *line.ops)
        state.edit.put(position, replace(now, operands=(op.operands[0], masked.name), frees=(*now.frees, masked.storage)))
        tail = _line(state.edit, op)
        tail.write("aten.index_put_", (now.results[0].name, mask.name), now.results[0], ".own", mask)
        state.edit.behind[position] = [*tail.ops, *state.edit.behind.get(position, ())]


def biases(state: Placed, plan: Plan) -> None:
    """A row product's bias is added by every rank, so each adds its share of it (`_partition_value` of Partial)."""
    rows = {x.table for chain in plan.chains for x in chain.rows}
    for position, op in enumerate(state.graph.flow.ops):
        if base_name(op.opcode) != "addmm" or op.operands[-1] not in rows:
            continue
        bias = state.graph.values[op.operands[0]]
        now = state.edit.op(position)
        line = _line(state.edit, op)
        share = line.run("aten.div.Tensor", (bias.name,), ".share", bias.dtype, bias.shape)
        state.edit.before(position, *line.ops)
        state.edit.put(position, replace(now, operands=(share.name, *now.operands[1:]), frees=(*now.frees, share.storage)))


def losses(state: Placed) -> None:
    """Cross entropies over divided logits. InconclusiveError where what the loss is made of is not one after the other."""
    flow = state.graph.flow
    for position, op in enumerate(flow.ops):
        if base_name(op.opcode) == "_log_softmax" and op.operands[0] in state.reach.parts:
            readers = [
                p for p in state.graph.readers[op.results[0].name] if base_name(flow.ops[p].opcode) == "nll_loss_forward"
            ]
            if len(readers) != 1 or not all(flow.ops[p].opcode.startswith("memir.") for p in range(position + 1, readers[0])):
                raise InconclusiveError("the loss is no cross entropy of the kind that loss_parallel knows", where=op.source)
            _forward(state, position, readers[0])
        elif base_name(op.opcode) == "nll_loss_backward" and op.operands[1] in state.reach.parts:
            after = position + 1
            if after >= len(flow.ops) or base_name(flow.ops[after].opcode) != "_log_softmax_backward_data":
                raise InconclusiveError("the loss's backward is not that of a cross entropy", where=op.source)
            _backward(state, position, after)


def _forward(state: Placed, softmax: int, nll: int) -> None:
    flow, edit = state.graph.flow, state.edit
    op, loss = edit.op(softmax), edit.op(nll)
    logits = state.local.value(state.graph.values[op.operands[0]])
    target = state.graph.values[loss.operands[1]]
    whole, rows, dtype = logits.shape, (*logits.shape[:-1], ONE), logits.dtype
    wide = "f32" if dtype in _HALF else dtype
    line = _line(edit, op)
    cast = wide != dtype
    x = line.run("aten._to_copy", (logits.name,), ".wide", wide, whole) if cast else logits
    top = line.run("aten.amax", (x.name,), ".top", wide, rows)
    most = line.run("_c10d_functional.all_reduce", (top.name,), ".top.tp", wide, rows, top)
    shifted = line.run("aten.sub.Tensor", (x.name, most.name), ".shifted", wide, whole)
    powers = line.run("aten.exp", (shifted.name,), ".exp", wide, whole)
    part = line.run("aten.sum.dim_IntList", (powers.name,), ".exp.sum", wide, rows, powers)
    total = line.run("_c10d_functional.all_reduce", (part.name,), ".exp.sum.tp", wide, rows, part)
    log = line.run("aten.log", (total.name,), ".log", wide, rows)
    gone = (shifted, most, total, log, *((x,) if cast else ()))
    if cast:
        result = line.run("aten.sub.Tensor", (shifted.name, log.name), ".result", wide, whole)
        last = replace(line.like, opcode="aten._to_copy", operands=(result.name,))
        gone = (*gone, result)
    else:
        last = replace(line.like, opcode="aten.sub.Tensor", operands=(shifted.name, log.name))
    last = replace(last, results=op.results, saves=op.saves, frees=(*op.frees, *(v.storage for v in gone)), drops=op.drops)
    edit.before(softmax, *line.ops)
    edit.put(softmax, last)
    edit.before(nll, *_picked(state, loss, target, op.results[0]))
    tail = edit.ahead[nll].pop()
    edit.put(nll, replace(tail, saves=loss.saves, drops=loss.drops, frees=(*tail.frees, *loss.frees), results=loss.results))
    del flow


def _picked(state: Placed, loss: Op, target: Value, logp: Value) -> list[Op]:
    """The loss itself: the targets' logarithms, which one rank has, summed over the ranks, then over the tokens."""
    line = _line(state.edit, loss)
    tokens, column, dtype = target.shape, (*target.shape, ONE), logp.dtype
    valid = line.run("aten.ne.Scalar", (target.name,), ".valid", "bool", tokens)
    safe = line.run("aten.where.ScalarOther", (valid.name, target.name), ".safe", "i64", tokens, valid)
    index = line.write("aten.unsqueeze", (safe.name,), replace(safe, shape=column, strides=contiguous(column)), ".column")
    masked, mask = _mask(line, index.name, column)
    picked = line.run("aten.gather", (logp.name, masked.name), ".picked", dtype, column)
    own = line.write("aten.index_put_", (picked.name, mask.name), picked, ".picked.own", mask)
    summed = line.run("_c10d_functional.all_reduce", (own.name,), ".picked.tp", dtype, column)
    minus = line.run("aten.neg", (summed.name,), ".minus", dtype, tokens)
    again = line.run("aten.ne.Scalar", (target.name,), ".valid2", "bool", tokens)
    each = line.run("aten.where.ScalarOther", (again.name, minus.name), ".each", dtype, tokens, again, minus)
    count = line.run("aten.ne.Scalar", (target.name,), ".valid3", "bool", tokens)
    number = line.run("aten.sum", (count.name,), ".number", "i64", (), count)
    line.ops.append(
        replace(
            line.like,
            opcode="aten.nll_loss_forward",
            operands=(each.name, number.name),
            frees=tuple(v.storage for v in (number, each, safe, masked, picked, summed)),
        )
    )
    return line.ops


def _backward(state: Placed, nll: int, softmax: int) -> None:
    edit = state.edit
    first, second = edit.op(nll), edit.op(softmax)
    grad, logp, target = (state.graph.values[o] for o in first.operands[:3])
    logp = state.local.value(logp)
    result = second.results[0]
    tokens, column, dtype = target.shape, (*target.shape, ONE), logp.dtype
    line = _line(edit, first)
    scaled = line.run("aten.div.Tensor", (grad.name, first.operands[-1]), ".scaled", dtype, ())
    valid = line.run("aten.ne.Scalar", (target.name,), ".valid", "bool", column)
    safe = line.run("aten.where.ScalarOther", (valid.name, target.name), ".safe", "i64", column, valid)
    zeros = line.run("aten.zeros_like", (logp.name,), ".zeros", dtype, logp.shape)
    flat = line.write("aten.squeeze.dim", (safe.name,), replace(safe, shape=tokens, strides=contiguous(tokens)), ".flat")
    masked, mask = _mask(line, flat.name, tokens)
    ones = line.run("aten._to_copy", (mask.name,), ".own", dtype, tokens)
    update = line.run("aten.sub.Tensor", (ones.name,), ".update", dtype, tokens, ones)
    rows = line.run("aten.arange", (), ".rows", "i64", tokens)
    put = line.write("aten.index_put_", (zeros.name, rows.name, masked.name, update.name), zeros, ".put")
    known = line.run("aten.ne.Scalar", (target.name,), ".valid2", "bool", column)
    each = line.run("aten.where.ScalarOther", (known.name, scaled.name), ".each", dtype, column, known, scaled)
    powers = line.run("aten.exp", (logp.name,), ".exp", dtype, logp.shape)
    total = line.run("aten.add.Tensor", (put.name, powers.name), ".total", dtype, logp.shape, powers)
    gone = tuple(v.storage for v in (total, each, safe, zeros, mask, masked, update, rows))
    product_of = replace(line.like, opcode="aten.mul.Tensor", operands=(total.name, each.name))
    same = result.dtype == dtype
    mine = [f for f in second.frees if f != first.results[0].storage]
    mine += [f for f in first.frees if f not in mine]
    if not same:
        raise InconclusiveError(
            "the loss's gradient is cast: memir does not know how loss_parallel does that", where=first.source
        )
    edit.before(nll, *line.ops)
    edit.put(nll, replace(product_of, results=(result,), frees=gone))
    edit.put(softmax, Op("memir.free", frees=tuple(mine)) if mine else None)
    edit.forget(first.results[0].storage)
