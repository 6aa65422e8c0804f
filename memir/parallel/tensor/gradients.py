"""Gradients placed as their parameters are where backward makes them: what FSDP does to the gradients of DTensors before it
reduces them (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_get_grad_inner_tensor`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ZERO
from memir.parallel.shards import in_optimizer
from memir.parallel.tensor.names import fresh
from memir.parallel.tensor.placements import Placed


def place(state: Placed, uncut: set[str], partial: set[str]) -> dict[str, Value]:
    """Parameter's storage -> its gradient now: a piece of one that was whole, the sum over the ranks of one that was partial.

    `uncut`, `partial`: storages of gradients. InconclusiveError where a gradient lives from step to step.
    """
    flow, edit = state.graph.flow, state.edit
    taken = set(flow.storage) | {s.name for s in flow.program.storages}
    declared = {s.name: s for s in flow.program.storages}
    makers: dict[str, list[int]] = defaultdict(list)
    for number, op in enumerate(flow.ops):
        for name in dict.fromkeys(r.storage for r in op.results):
            makers[name].append(number)
    found: dict[str, Value] = {}
    for name in sorted(uncut | partial, key=lambda n: flow.born.get(n, -1)):
        storage = declared[name]
        if storage.live_in or storage.live_out or name not in flow.born or storage.of is None:
            raise InconclusiveError(
                "a gradient that outlives the step cannot be placed yet", where=f"${name}", hint="zero_grad last"
            )
        position = max(p for p in makers[name] if not in_optimizer(flow.phase[p]))
        value = next(r for r in reversed(flow.ops[position].results) if r.storage == name)
        shape = (state.local.piece(value.shape[0]), *value.shape[1:]) if name in uncut else value.shape
        new = fresh(name, ".placed", taken)
        edit.declare(replace(storage, name=new, nbytes=product(shape) * ITEMSIZE[value.dtype]))
        result = Value(new, value.dtype, shape, contiguous(shape), ZERO, new)
        opcode = "aten.clone" if name in uncut else "_c10d_functional.all_reduce"
        op = flow.ops[position]
        freed = edit.take_free(name)
        edit.after(
            position,
            Op(opcode, (value.name,), (result,), frees=(name,), path=op.path, source=op.source, forward_of=op.forward_of),
        )
        if freed is not None:
            last = edit.op(freed)
            edit.put(freed, replace(last, frees=(*last.frees, new)))
        whole: Storage = edit.storage(name)
        edit.storages[name] = replace(whole, kind=Kind.TEMPORARY, of=None)
        found[storage.of] = result
    return found


def read_placed(state: Placed, gradients: dict[str, Value]) -> None:
    """The optimizer's operators read the gradients that `place` made; those of shards do already."""
    flow = state.graph.flow
    now = {s.name: gradients[s.of].name for s in flow.program.storages if s.kind == Kind.GRADIENT and s.of in gradients}
    for position, op in enumerate(flow.ops):
        read = {o: now[flow.storage[o]] for o in op.operands if flow.storage[o] in now}
        if read and in_optimizer(flow.phase[position]):
            state.edit.rename(position, read)
