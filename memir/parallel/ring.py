"""Ring attention on one rank, as PyTorch's templates run it: which tensors it makes, and when they die.

torch/distributed/tensor/experimental/_context_parallel/_attention.py: `_templated_ring_attention`, `_SDPAMerger`,
`_templated_ring_attention_backward`. Keys and values of the other ranks come by one all-gather (the default) or from neighbour
to neighbour; results are merged in fp32. With load balancing a rank has a part of the head and a part of the tail of the
sequence, so that of its neighbours' keys, or of its own queries, only a half takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.opset import scratch_of, scratch_target
from memir.ir.size import ONE, Size, floor_div
from memir.parallel.frame import Frame, Shape

Rotate = Literal["all-gather", "all-to-all"]
Kernel = Callable[[Frame, Value, Value, Value], tuple[Value, ...]]  # frame, query, key, value -> the kernel's results
SEQUENCE = 2  # the dimension of [B, H, S, K]


@dataclass(frozen=True, slots=True)
class Ring:
    """Where a rank is, and PyTorch's options (`_ContextParallelOptions`)."""

    degree: int
    rank: int
    rotate: Rotate
    balance: bool

    def skips(self, turn: int) -> bool:
        """Whether causality leaves nothing to compute (`_is_causal_behavior`)."""
        return turn > 0 and not self.balance and (self.rank - turn) % self.degree > self.rank

    def partial(self, turn: int) -> bool:
        """Whether only the second half of the queries takes part."""
        return self.balance and turn > self.rank

    def half_keys(self, turn: int) -> bool:
        """Whether only the first half of the keys takes part."""
        return self.balance and 0 < turn <= self.rank

    @property
    def ends_partial(self) -> bool:
        """Whether the last thing that is done to the output is to put a half into it, which makes it contiguous."""
        return self.balance and self.rank < self.degree - 1


def forward(frame: Frame, ring: Ring, query: Value, key: Value, value: Value, kernel: Kernel) -> tuple[Value, Value]:
    """The merged output and logsumexp."""
    key, value = (_contiguous(frame, t) for t in (key, value))
    frame.let(key=key, value=value)
    out = lse = None
    for turn in range(ring.degree):
        if turn:
            key, value = _taken(frame, key, value, "rotater")
        if turn < ring.degree - 1:
            _send(frame, ring, key, value, "rotater")
            frame.let(next_kv=None)
        if ring.skips(turn):
            continue
        q = _half(frame, query, 1) if ring.partial(turn) else query
        k, v = (_half(frame, t, 0) for t in (key, value)) if ring.half_keys(turn) else (key, value)
        made, sums = kernel(frame, q, k, v)[:2]
        frame.let(out=made, logsumexp=sums)
        wide = made if made.dtype == "f32" else _cast(frame, made, "f32")
        frame.let(block=wide)
        if out is None or lse is None:
            out, lse = wide, sums
        else:
            out, lse = _merged(frame, ring.partial(turn), out, lse, wide, sums)
        frame.let(_out=out, _lse=lse, block=None)
    assert out is not None
    assert lse is not None
    if out.dtype != query.dtype:
        out = _cast(frame, out, query.dtype)
        frame.let(_out=out)
    frame.end(out, lse)
    return out, lse


def backward(
    frame: Frame, ring: Ring, query: Value, key: Value, value: Value, lse: Value, kernel: Kernel
) -> tuple[Value, Value, Value]:
    """The gradients; those of key and value lie in one storage."""
    shapes = key.shape, value.shape
    grad_query, grad_key, grad_value = (_zeros(frame, t) for t in (query, key, value))
    frame.let(grad_query=grad_query, grad_key=grad_key, grad_value=grad_value)
    key, value = (_contiguous(frame, t) for t in (key, value))
    frame.let(key=key, value=value)
    for turn in range(ring.degree):
        if turn:
            key, value = _taken(frame, key, value, "kv_rotater")
        if turn < ring.degree - 1:
            _send(frame, ring, key, value, "kv_rotater")
        if ring.skips(turn):
            parts: tuple[Value, ...] = tuple(_zeros(frame, t) for t in (query, key, value))
        else:
            q = _half(frame, query, 1) if ring.partial(turn) else query
            k, v = (_half(frame, t, 0) for t in (key, value)) if ring.half_keys(turn) else (key, value)
            if ring.partial(turn):
                frame.let(lse=frame.run("aten.clone", (lse,), (*lse.shape[:2], floor_div(lse.shape[2], 2), *lse.shape[3:])))
            parts = kernel(frame, q, k, v)[:3]
        frame.let(grad_query_=parts[0], grad_key_=parts[1], grad_value_=parts[2])
        if turn:
            grad_key, grad_value = _taken(frame, grad_key, grad_value, "dkv_rotater", "next_grad_kv", "grad_key", "grad_value")
        if ring.half_keys(turn):
            grad_key = frame.run("aten.cat", (grad_key, parts[1]), shapes[0])
            frame.let(grad_key=grad_key)
            grad_value = frame.run("aten.cat", (grad_value, parts[2]), shapes[1])
            frame.let(grad_value=grad_value)
        flat = [_flattened(frame, t) for t in (grad_key, grad_value)]
        both = frame.run("aten.cat", tuple(flat), (product(shapes[0]) + product(shapes[1]),), dtype="f32")
        frame.let(next_grad_kv=both)
        frame.let(dkv_rotater=frame.run("_c10d_functional.all_to_all_single", (both,), both.shape))
        if ring.partial(turn):
            grad_query = frame.run("aten.cat", (grad_query, parts[0]), query.shape)
            frame.let(grad_query=grad_query)
    if grad_query.dtype != query.dtype:
        grad_query = _cast(frame, grad_query, query.dtype)
        frame.let(grad_query=grad_query)
    last = Value("", "f32", (product(shapes[0]) + product(shapes[1]),), (ONE,), Size(), frame.holding.slots["dkv_rotater"][0])
    last = replace(last, name=last.storage)
    if last.dtype != query.dtype:
        last = _cast(frame, last, query.dtype)
    frame.let(next_grad_kv=last)
    grad_key, grad_value = frame.view(last, shapes[0]), frame.view(last, shapes[1], product(shapes[0]))
    frame.end(grad_query, grad_key)
    return grad_query, grad_key, grad_value


def kernel_of(op: Op, before: tuple[Value, ...], values: tuple[Value, ...]) -> Kernel:
    """The kernel of an attention operator on parts of its tensors: each result has the shape of the part that it belongs to.

    `before` are the operator's operands, (query, key, value) of a forward, (gradient, query, key, value, output, logsumexp,
    ...) of a backward; `values` its results, (output, logsumexp) or three gradients. Its workspace follows its own rule.
    """
    differentiates = len(before) > 3
    target = scratch_target(op, before)

    def run(frame: Frame, query: Value, key: Value, value: Value) -> tuple[Value, ...]:
        made = []
        shapes = (query.shape, key.shape, value.shape) if differentiates else _output_shapes(values, query, value)
        for result, shape in zip(values, shapes, strict=True):
            name = frame.fresh()
            made.append(replace(result, name=name, storage=name, shape=shape, strides=_as(result, shape), offset=Size()))
            frame.storages.append(Storage(name, product(shape) * ITEMSIZE[result.dtype], Kind.TEMPORARY))
        operands: tuple[Value, ...] = (query, key, value)
        if differentiates:
            beside = [_as_long_as(t, query) for t in (before[0], *before[4:6])]
            operands = (beside[0], query, key, value, *beside[1:], *before[6:])
        scratch = scratch_of(target, op.opcode, operands, made) if target else op.scratch
        frame.emit(
            replace(
                frame.bare(),
                opcode=op.opcode,
                operands=tuple(v.name for v in operands),
                results=tuple(made),
                scratch=scratch,
            )
        )
        frame.holding.append("stack", (m.storage for m in made))
        return tuple(made)

    return run


def _as_long_as(value: Value, query: Value) -> Value:
    """The tensor as it is for these queries: their half of a gradient, an output or a logsumexp."""
    shape = tuple(query.shape[SEQUENCE] if k == SEQUENCE else extent for k, extent in enumerate(value.shape))
    return replace(value, shape=shape)


def _output_shapes(values: tuple[Value, ...], query: Value, value: Value) -> tuple[Shape, ...]:
    output = (*query.shape[:3], value.shape[3])
    sums = tuple(query.shape[SEQUENCE] if n == SEQUENCE else extent for n, extent in enumerate(values[1].shape))
    return (output, sums)


def _as(like: Value, shape: Shape) -> Shape:
    """Strides in the order of another tensor's of the same number of dimensions."""
    if like.strides == contiguous(like.shape):
        return contiguous(shape)
    inner = (like.shape[0], like.shape[2], like.shape[1], *like.shape[3:])
    if len(like.shape) >= 3 and _swapped(contiguous(inner)) == like.strides:
        return _swapped(contiguous((shape[0], shape[2], shape[1], *shape[3:])))
    return contiguous(shape)


def _swapped(strides: Shape) -> Shape:
    return (strides[0], strides[2], strides[1], *strides[3:])


def _merged(frame: Frame, partial: bool, out: Value, lse: Value, block: Value, sums: Value) -> tuple[Value, Value]:
    """out - sigmoid(block_lse - lse) * (out - block_out), lse - logsigmoid(lse - block_lse); a half is put back by a copy."""
    whole = out.shape, lse.shape
    shape, small = block.shape, sums.shape
    difference = frame.run("aten.sub.Tensor", (sums, lse), small)
    gate = frame.run("aten.sigmoid", (difference,), small)
    frame.forget(difference)
    change = frame.run("aten.sub.Tensor", (out, block), shape)
    step = frame.run("aten.mul.Tensor", (gate, change), shape)
    frame.forget(gate, change)
    new = frame.run("aten.sub.Tensor", (out, step), shape, strides=contiguous(shape) if partial else out.strides)
    frame.let(merged=new)
    difference = frame.run("aten.sub.Tensor", (lse, sums), small)
    logarithm = frame.run("aten.log_sigmoid_forward", (difference,), small)
    frame.forget(difference)
    new_lse = frame.run("aten.sub.Tensor", (lse, logarithm), small)
    frame.let(merged_lse=new_lse)
    if partial:
        new_lse = frame.run("aten.cat", (lse, new_lse), whole[1])
        frame.let(_lse=new_lse)
        new = frame.run("aten.cat", (out, new), whole[0])
        frame.let(_out=new)
    frame.let(_lse=new_lse, _out=new, merged=None, merged_lse=None)
    return new, new_lse


def _send(frame: Frame, ring: Ring, key: Value, value: Value, rotater: str) -> None:
    """Keys and values in one tensor go around; an all-gather does it once."""
    both = frame.run("aten.cat", (key, value), (product(key.shape) + product(value.shape),))
    frame.let(next_kv=both)
    if ring.rotate == "all-gather":
        if rotater not in frame.holding.slots:
            gathered = frame.run("_c10d_functional.all_gather_into_tensor", (both,), (both.shape[0] * ring.degree,))
            frame.let(**{rotater: gathered})
    else:
        frame.let(**{rotater: frame.run("_c10d_functional.all_to_all_single", (both,), both.shape)})


def _taken(
    frame: Frame, key: Value, value: Value, rotater: str, buffer: str = "next_kv", first: str = "key", second: str = "value"
) -> tuple[Value, Value]:
    """What has come, as two views."""
    name = frame.holding.slots[rotater][0]
    made = next(r for op in reversed(frame.ops) for r in op.results if r.storage == name and r.name == name)
    now = frame.view(made, key.shape), frame.view(made, value.shape, product(key.shape))
    frame.let(**{buffer: made, first: now[0], second: now[1]})
    return now


def _contiguous(frame: Frame, value: Value) -> Value:
    return value if value.strides == contiguous(value.shape) else frame.run("aten.clone", (value,), value.shape)


def _flattened(frame: Frame, value: Value) -> Value:
    if value.strides == contiguous(value.shape):
        return value
    return frame.run("aten.clone", (value,), (product(value.shape),))


def _half(frame: Frame, value: Value, number: int) -> Value:
    shape = (*value.shape[:SEQUENCE], floor_div(value.shape[SEQUENCE], 2), *value.shape[SEQUENCE + 1 :])
    return frame.view(value, shape, value.strides[SEQUENCE] * shape[SEQUENCE] * number, value.strides)


def _zeros(frame: Frame, value: Value) -> Value:
    dense = _as(value, value.shape)
    return frame.run("aten.zeros_like", (value,), value.shape, dtype="f32", strides=dense)


def _cast(frame: Frame, value: Value, dtype: str) -> Value:
    return frame.run("aten._to_copy", (value,), value.shape, dtype=dtype, strides=value.strides)
