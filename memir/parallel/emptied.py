"""A step without its optimizer phase: DeepSpeed's engine clips, steps and forgets gradients in its own way.

What the phase freed of others is freed at its beginning, what it left behind for the next step is still there.
"""

from __future__ import annotations

from dataclasses import replace

from memir.errors import UsageError
from memir.ir.core import Kind, Op
from memir.parallel.edit import Edit
from memir.parallel.shards import in_optimizer


def empty_optimizer(edit: Edit, trained: frozenset[str]) -> int:
    """Takes the phase's operators, states and gradients of `trained` parameters out; the position where others may go.

    UsageError for a step without an optimizer.
    """
    flow = edit.flow
    positions = [p for p in range(len(flow.ops)) if in_optimizer(flow.phase[p])]
    states = [s for s in flow.program.storages if s.kind == Kind.OPTIMIZER_STATE and s.of in trained]
    if not positions or not states:
        hint = "trace a training step with its optimizer, --optimizer adamw"
        raise UsageError("the step has no optimizer whose states could be partitioned", hint=hint)
    gradients = {s.name for s in flow.program.storages if s.kind == Kind.GRADIENT and s.of in trained}
    gone = gradients | {s.name for s in states}
    born = {v.storage for p in positions for v in flow.ops[p].results if flow.born.get(v.storage) == p}
    kept = {s.name for s in flow.program.storages if s.name in born and s.live_out}
    first = positions[0]
    left: list[str] = []
    for position in positions:
        op = flow.ops[position]
        left += [f for f in op.frees if f not in gone and f not in born]
        made = tuple(v for v in op.results if v.storage in kept and flow.born[v.storage] == position)
        edit.put(position, Op("memir.alloc", results=made) if made else None)
    for name in born - kept:
        edit.forget(name)
    if left:
        edit.before(first, Op("memir.free", frees=tuple(left)))
    for storage in states:
        edit.forget(storage.name)
    for name in gradients:
        end = flow.freed.get(name)
        if end is not None and end not in positions:
            edit.take_free(name)
            if edit.op(end).opcode == "memir.free" and not edit.op(end).frees:
                edit.put(end, None)
        if name in flow.born:
            edit.storages[name] = replace(edit.storage(name), live_out=False)
        else:
            edit.forget(name)
    for value in flow.program.values:
        if value.storage in gone and edit.storages.get(value.storage, "") is None:
            edit.values[value.name] = None
    return first
