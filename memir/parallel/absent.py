"""Parameters of which a rank holds nothing: the optimizer never sees them there.

With use_orig_params a parameter that lies in other ranks' parts of the flat parameter has no gradient on this one
(torch/distributed/fsdp/_flat_param.py, `_use_sharded_grad_views`), and torch.optim leaves parameters without gradient out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memir.ir.core import Kind, Op, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.shards import in_optimizer

_LISTS = ("aten._foreach_", "aten._fused_", "aten.stack")


def without_absent(edit: Edit, parameters: Collection[str]) -> None:
    """Takes the parameters' states, and what the optimizer's phase does with them, out of the program."""
    flow = edit.flow
    storages = {s.name: s for s in flow.program.storages}
    gone = {s.name for s in storages.values() if s.of in parameters and s.kind == Kind.OPTIMIZER_STATE}
    for name in gone:
        edit.forget(name)
    edit.values.update({v.name: None for v in flow.program.values if v.storage in gone})
    gradients = {s.name for s in storages.values() if s.of in parameters and s.kind == Kind.GRADIENT}
    absent = gone | gradients | set(parameters)
    for position, op in enumerate(flow.ops):
        if not in_optimizer(flow.phase[position]):
            continue
        reached = [o for o in op.operands if flow.storage[o] in absent]
        if not reached:
            continue
        listed = op.opcode.startswith(_LISTS)
        if listed and len(reached) < len(op.operands):
            made = _shorter(edit, op, [k for k, o in enumerate(op.operands) if flow.storage[o] in absent], absent)
            edit.put(position, replace(edit.op(position), operands=made.operands, results=made.results))
            continue
        absent |= {r.storage for r in op.results if flow.born.get(r.storage) == position}
        frees = edit.op(position).frees
        edit.put(position, Op("memir.free", frees=frees) if frees else None)
    for name in absent - gone - gradients - set(parameters):
        edit.take_free(name)
        edit.forget(name)


def _shorter(edit: Edit, op: Op, places: list[int], absent: set[str]) -> Op:
    """The operator over a list without the operands at `places`; a stack of numbers is as much shorter."""
    operands = tuple(o for k, o in enumerate(op.operands) if k not in places)
    if op.opcode.startswith("aten.stack"):
        (result,) = op.results
        shape = (Size.of(len(operands)), *result.shape[1:])
        edit.resize(result.storage, product(shape) * ITEMSIZE[result.dtype])
        return replace(op, operands=operands, results=(replace(result, shape=shape, strides=contiguous(shape), offset=ZERO),))
    results: list[Value] = []
    for place, result in enumerate(op.results):
        if place in places:
            absent.add(result.storage)
        else:
            results.append(result)
    return replace(op, operands=operands, results=tuple(results))
