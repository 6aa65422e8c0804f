"""The gradient that each backward of a step gives a parameter, where several micro-batches add theirs up.

Autograd keeps the first gradient it makes, and adds every later one into it (torch/csrc/autograd/functions/accumulate_grad.h,
AccumulateGrad::accumulateGrad). FSDP takes each gradient away after its backward, so that the additions are not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memir.ir.core import Op, Value
from memir.parallel.edit import Edit
from memir.rewrite.flow import Flow


@dataclass(frozen=True, slots=True)
class Part:
    """A backward's gradient of a parameter: its last tensor of that shape, and the addition into the sum (None: the first)."""

    value: Value
    addition: int | None = None


def parts_of(flow: Flow, gradients: Iterable[tuple[str, Value]], *, summed: bool = False) -> dict[tuple[str, str], Part]:
    """(phase, parameter) -> the gradient that this backward makes; `gradients`: its storage and the parameter's tensor.

    With `summed` it is the sum so far, and its addition stays.
    """
    owner = dict(gradients)
    values = {v.name: v for v in flow.program.values} | {r.name: r for op in flow.ops for r in op.results}
    found: dict[tuple[str, str], Part] = {}
    for position, op in enumerate(flow.ops):
        phase = flow.phase[position]
        if not phase.endswith("backward"):
            continue
        for result in op.results:
            parameter = owner.get(result.storage)
            if parameter is None:
                continue
            key = phase, parameter.storage
            if result.shape != parameter.shape:  # a whole gradient of a part, under tensor parallelism
                found.setdefault(key, Part(result))
                continue
            if flow.phase[flow.born[result.storage]] == phase:
                found[key] = Part(result)
            elif op.opcode == "aten.add_.Tensor" and flow.storage[op.operands[0]] == result.storage:
                found[key] = Part(result) if summed else Part(values[op.operands[1]], position)
    return found


def without_additions(edit: Edit, parts: Iterable[Part]) -> None:
    """Takes the additions out; what died with one besides the gradient itself still dies there."""
    for part in parts:
        if part.addition is None:
            continue
        edit.take_free(part.value.storage)
        op = edit.op(part.addition)
        edit.put(part.addition, Op("memir.free", frees=op.frees) if op.frees else None)
