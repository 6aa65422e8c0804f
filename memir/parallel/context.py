"""A step whose sequences are divided over ranks: every operator has the rank's part, and attention goes around the ring."""

from __future__ import annotations

from dataclasses import replace

from memir.errors import UsageError
from memir.ir.core import Op, Program, Value
from memir.ir.layout import contiguous
from memir.parallel.edit import Edit
from memir.parallel.frame import Frame, within
from memir.parallel.relayout import relaid
from memir.parallel.ring import Ring, backward, forward, kernel_of
from memir.parallel.stages import rename
from memir.rewrite.flow import Flow

_FLASH = "aten._scaled_dot_product_flash_attention"
KERNELS = (
    _FLASH,
    f"{_FLASH}_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
)
_OTHERS = ("aten._scaled_dot_product_attention_math", "aten._softmax", "aten._flash_attention_forward")


def around_the_ring(program: Program, ring: Ring) -> tuple[Program, list[int]]:
    """The flat program with ring attention, its S being the rank's part; the origin of each operator.

    UsageError where no kernel of attention is called that PyTorch's ring has, or one with a mask.
    """
    edit = Edit(Flow(program))
    values = {v.name: v for v in program.values} | {r.name: r for op in edit.flow.ops for r in op.results}
    found = False
    for position, op in enumerate(edit.flow.ops):
        if op.opcode in KERNELS:
            found = True
            _forward(edit, values, position, op, ring)
        elif op.opcode.endswith("_backward") and op.opcode.removesuffix("_backward") in KERNELS:
            _backward(edit, values, position, op, ring)
        elif op.opcode in _OTHERS and not found:
            raise UsageError(
                "context-parallel: PyTorch's ring attention has the flash, efficient and cuDNN kernels only",
                where=" ".join(filter(None, (op.opcode, f"@{op.path}", op.source))),
                hint="--attention sdpa",
            )
    if not found:
        raise UsageError("context-parallel: the step calls no attention kernel", hint="--attention sdpa")
    return edit.applied()


def _forward(edit: Edit, values: dict[str, Value], position: int, op: Op, ring: Ring) -> None:
    if len(op.operands) > 3:
        message = "context-parallel: PyTorch's ring attention takes no mask"
        raise UsageError(message, where=" ".join(filter(None, (op.opcode, f"@{op.path}", op.source))))
    query, key, value = (values[name] for name in op.operands)
    frame = Frame(within(op.results[0].name, ".ring"), op)
    kernel = kernel_of(op, (query, key, value), op.results[:2])
    out, lse = forward(frame, ring, query, key, value, kernel)
    made = op.results[0]
    after = replace(made, strides=contiguous(made.shape)) if ring.ends_partial else made
    _put(edit, position, op, frame, [(out, after), (lse, op.results[1])], op.results[2:])
    if after != made:
        relaid(edit, values, made, after, position)
        values[made.name] = after


def _backward(edit: Edit, values: dict[str, Value], position: int, op: Op, ring: Ring) -> None:
    before = tuple(values[name] for name in op.operands)
    _, query, key, value, _, lse = before[:6]
    frame = Frame(within(op.results[0].name, ".ring"), op)
    grads = backward(frame, ring, query, key, value, lse, kernel_of(op, before, op.results[:3]))
    first, second, third = op.results[:3]
    after = replace(first, strides=contiguous(first.shape)) if ring.ends_partial else first
    whole = replace(second, strides=contiguous(second.shape))
    rest = replace(third, storage=second.storage, strides=contiguous(third.shape), offset=grads[2].offset)
    _put(edit, position, op, frame, [(grads[0], after), (grads[1], whole), (grads[2], rest)], op.results[3:])
    both = [p for p in (edit.take_free(second.storage), edit.take_free(third.storage)) if p is not None]
    edit.resize(second.storage, edit.storage(second.storage).nbytes + edit.storage(third.storage).nbytes)
    edit.forget(third.storage)
    for old, new in ((second, whole), (third, rest)):
        relaid(edit, values, old, new, position)
    if after != first:
        relaid(edit, values, first, after, position)
    last = max(both)
    edit.put(last, replace(edit.op(last), frees=(*edit.op(last).frees, second.storage)))


def _put(edit: Edit, position: int, op: Op, frame: Frame, results: list[tuple[Value, Value]], rest: tuple[Value, ...]) -> None:
    """The frame's operators stand in the operator's place; what it returned goes by the names that are known outside."""
    values = {mine.name: outer.name for mine, outer in results}
    storages = {mine.storage: outer.storage for mine, outer in results}
    outer = {new.name: new for _, new in results}
    ops = [rename(one, values, storages) for one in frame.ops]
    ops = [replace(one, results=tuple(outer.get(r.name, r) for r in one.results)) for one in ops]
    for storage in frame.storages:
        if storage.name not in storages:
            edit.declare(storage)
    last = max(k for k, one in enumerate(ops) if one.opcode == op.opcode)
    ops[last] = replace(ops[last], results=(*ops[last].results, *rest))
    *ahead, end = ops
    edit.before(position, *ahead)
    edit.put(position, replace(end, frees=(*end.frees, *op.frees), drops=op.drops, saves=op.saves))
