"""A gradient that DeepSpeed takes as it comes: after each backward parameters have no gradient, so nothing is added to it."""

from __future__ import annotations

from memir.errors import InconclusiveError
from memir.ir.core import Op
from memir.parallel.arrivals import Arrival
from memir.parallel.edit import Edit


def taken(edit: Edit, arrival: Arrival, number: int) -> tuple[str, str]:
    """(storage, value) of the gradient of backward phase `number`; its storage is then freed by nothing any more.

    In the step a later micro-batch's gradient is added to the first's: here that addition is taken out.
    InconclusiveError where it is accumulated by another operator.
    """
    flow, name, end = edit.flow, arrival.gradient.name, arrival.ends[number]
    position = next(p for p in range(end, -1, -1) if any(r.storage == name for r in flow.ops[p].results))
    op = edit.op(position)
    if number == 0:
        return name, next(r.name for r in reversed(op.results) if r.storage == name)
    added = next((o for o in op.operands if flow.storage[o] != name), None)
    if not op.opcode.startswith("aten.add_") or added is None:
        raise InconclusiveError("a gradient is accumulated by another operator than an addition", where=op.opcode)
    storage = flow.storage[added]
    edit.put(position, None)
    others = tuple(f for f in op.frees if f != storage)
    if others:
        edit.after(position, Op("memir.free", frees=others))
    if storage not in op.frees:
        edit.take_free(storage)
    return storage, added
