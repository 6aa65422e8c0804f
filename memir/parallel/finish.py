"""What follows the last micro-batch on a pipeline rank: gradients scaled, outputs joined, clipping, optimizer, zero_grad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memir.ir.core import Kind, Op, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ZERO
from memir.parallel.assembly import Assembly
from memir.parallel.running import Run


def finish(assembly: Assembly, run: Run) -> None:
    """Gradients are scaled (stage.py, `scale_grads`), the call's variables go, and the caller drops the joined outputs.

    A parameter that two stages have has its gradients summed over them, as Megatron-LM does it
    (megatron/core/distributed/finalize_model_grads.py, `_allreduce_word_embedding_grads`): in place.
    """
    plan = assembly.plan
    assembly.begin(f"stage{plan.stages[0]}.finish")
    end = len(assembly.stages.flow.ops) - 1
    assembly.emit(Op("memir.free", source="schedule"), end)
    for value in assembly.stages.tied_gradients():
        if value.storage in assembly.gradients:
            own = assembly.gradients[value.storage]
            summed = replace(own, name=f"{own.name}/reduced")
            assembly.emit(Op("_c10d_functional.all_reduce_", (own.name,), (summed,)), end)
    for value in assembly.gradients.values() if plan.scale and plan.microbatches > 1 else ():
        scaled = replace(value, name=f"{value.name}/scaled")
        assembly.emit(Op("aten.div_.Tensor", (value.name,), (scaled,)), end)
    assembly.holding.put("losses", ())
    run.end()
    if assembly.outputs and plan.outputs:
        _join(assembly, end)
    _carry(assembly)
    ops = assembly.phases[-1][1]
    if not ops[0].frees:
        del ops[0]
        del assembly.origins[len(assembly.origins) - len(ops) - 1]
    if not ops:
        assembly.phases.pop()


def _join(assembly: Assembly, end: int) -> None:
    """merge_chunks (microbatch.py) concatenates. The outputs stay until the next step clears them (`clear_runtime_states`)."""
    first = assembly.outputs[0]
    shape = (first.shape[0] * len(assembly.outputs), *first.shape[1:])
    whole = Value("outputs", first.dtype, shape, contiguous(shape), ZERO, "outputs")
    assembly.storages["outputs"] = Storage("outputs", product(shape) * ITEMSIZE[first.dtype], Kind.ACTIVATION)
    assembly.emit(Op("aten.cat", tuple(o.name for o in assembly.outputs), (whole,), frees=("outputs",)), end)
    assembly.carried += [o.storage for o in assembly.outputs]


def _carry(assembly: Assembly) -> None:
    """What stays until the next step begins: this step lets go of the last one's (`clear_runtime_states`)."""
    old = []
    for name in assembly.carried:
        assembly.storages[name] = replace(assembly.storages[name], kind=Kind.ACTIVATION, live_out=True)
        old.append(f"{name}/before")
        assembly.storages[old[-1]] = replace(assembly.storages[name], name=old[-1], live_in=True, live_out=False)
    if old:
        assembly.emit_first(Op("memir.free", frees=tuple(old), source="clear_runtime_states"))


def append_optimizer(assembly: Assembly, rest: Program, origins: Sequence[int]) -> None:
    """The phases of `rest` that are no forward or backward; gradients die where they did."""
    flow = assembly.stages.flow
    declared = {s.name: s for s in rest.storages}
    ops = {origin: op for (_, op), origin in zip(rest.ops(), origins, strict=True)}
    for position, phase in enumerate(flow.phase):
        if phase.endswith(("forward", "backward")):
            continue
        op = ops.get(position, Op("memir.free"))
        ended = [n for n in flow.ops[position].frees if n in assembly.gradients and not assembly.storages[n].live_out]
        frees = tuple(dict.fromkeys([*ended, *(n for n in op.frees if n in assembly.storages or n in declared)]))
        if op.opcode == "memir.free" and not frees:
            continue
        for value in op.results:
            if value.storage in declared:
                assembly.storages.setdefault(value.storage, declared[value.storage])
        if assembly.phases[-1][0] != phase:
            assembly.begin(phase)
        operands = tuple(_standing(assembly, operand) for operand in op.operands)
        assembly.emit(replace(op, operands=operands, frees=frees, source=op.source or flow.ops[position].source), position)


def _standing(assembly: Assembly, operand: str) -> str:
    """The value to read: a view of a parameter may have been made on another stage that has the same one."""
    if operand in assembly.named:
        return operand
    view = assembly.stages.values[operand]
    alike = (v for v in assembly.values if replace(v, name=operand) == view)
    return next((v.name for v in alike), operand)
