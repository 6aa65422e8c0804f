"""Additions in place made out of place: autograd's engine adds DTensors so, which are a tensor subclass
(torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.parallel.tensor.names import fresh
from memir.rewrite.flow import Flow, in_place


def apart(program: Program, names: Collection[str]) -> Program:
    """The flat program in which the sums that go by these names, where they are written in place, are tensors of their own.

    What lay in the storage before dies with the addition. Each tensor is named after its value; a parameter's gradient, which
    the last sum is, stays what it was.
    """
    flow = Flow(program)
    sums = [p for p, op in enumerate(flow.ops) if in_place(op.opcode) and op.results and op.results[0].name in names]
    turns: dict[str, list[int]] = defaultdict(list)  # storage -> its sums in order
    for position in sums:
        turns[flow.ops[position].results[0].storage].append(position)
    declared = {s.name: s for s in program.storages}
    taken = set(declared)
    now: dict[str, str] = {}  # storage -> what is in its place
    after: dict[int, str] = {}  # sum -> its storage
    added: list[Storage] = []
    for name, positions in turns.items():
        storage = declared[name]
        if storage.live_in:
            raise InconclusiveError("a sum of DTensors is written into a tensor from before the step", where=f"${name}")
        keeps = storage.kind == Kind.GRADIENT or storage.live_out
        makers = [flow.born[name], *positions]
        for number, position in enumerate(makers):
            value = next(r for r in flow.ops[position].results if r.storage == name)
            if keeps and number == len(positions):
                now_named = name
            else:
                now_named = fresh(value.name, ".sum", taken)
                added.append(replace(storage, name=now_named, kind=Kind.TEMPORARY if keeps else storage.kind, of=None))
            if number:
                after[position] = now_named
            else:
                now[name] = now_named
    gone = {name for name in turns if name not in after.values()}
    values = {v.name: v for v in program.values} | {r.name: r for op in flow.ops for r in op.results}
    last: dict[str, Value] = {}  # storage -> the sum that lies in it
    phases: list[tuple[str, list[Op]]] = []
    for position, phase in enumerate(flow.phase):
        if not phases or phases[-1][0] != phase:
            phases.append((phase, []))
        op = flow.ops[position]
        op = replace(op, operands=tuple(_latest(values[o], flow.made.get(o, -1), last, flow) for o in op.operands))
        if position in after:
            last[op.results[0].storage] = op.results[0]
            storage_name = op.results[0].storage
            before, now[storage_name] = now[storage_name], after[position]
            op = replace(_renamed(op, now), opcode="aten.add.Tensor", frees=(*_renamed(op, now).frees, before))
        else:
            op = _renamed(op, now)
        phases[-1][1].append(op)
    kept = tuple(s for s in program.storages if s.name not in gone)
    return replace(program, storages=(*kept, *added), phases=tuple(Phase(name, tuple(ops)) for name, ops in phases))


def _latest(value: Value, made: int, last: Mapping[str, Value], flow: Flow) -> str:
    """The value to read: one that was made before the storage's last sum went by another name for the same tensor."""
    total = last.get(value.storage)
    if total is None or made >= flow.made[total.name]:
        return value.name
    if (value.shape, value.strides, value.offset) != (total.shape, total.strides, total.offset):
        raise InconclusiveError("a view of a gradient is read after the gradient was added to", where=f"%{value.name}")
    return total.name


def _renamed(op: Op, now: dict[str, str]) -> Op:
    def swap(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(now.get(n, n) for n in group)

    if not now.keys() & {*(r.storage for r in op.results), *op.frees, *op.drops, *op.saves}:
        return op
    results = tuple(replace(r, storage=now.get(r.storage, r.storage)) for r in op.results)
    return replace(op, results=results, frees=swap(op.frees), drops=swap(op.drops), saves=swap(op.saves))
