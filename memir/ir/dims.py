"""The dimension rule of each opcode: when one dimension of a tensor is divided, which of the others' are divided with it.

A part may come from any operand or result and goes to all others: a rule is an equation between dimensions, einsum-like, and
is read in both directions. What is summed over a part is partial; what needs the whole of it (softmax, a norm's mean)
is a barrier.
Sharding passes read it; an opcode without a rule that meets a part is for them to name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memir.ir.core import Op, Value
from memir.ir.reshape import Part, kept_dims, permuted, quotient, reshaped
from memir.ir.size import ONE

Slot = int  # k: operand k; -1 - k: result k


@dataclass(frozen=True, slots=True)
class Spread:
    """Where a part goes: the other tensors' parts, the results that become partial sums, or why it may not be divided."""

    parts: tuple[tuple[Slot, Part], ...] = ()
    partial: tuple[Slot, ...] = ()
    barrier: str = ""


Rule = Callable[[Sequence[Value], Sequence[Value], Slot, Part], Spread]

WHOLE = Spread(barrier="needs the whole dimension")


def base_name(opcode: str) -> str:
    """The operator's name without namespace and overload: `add` of aten.add_.Tensor."""
    parts = opcode.split(".")
    return (parts[1] if len(parts) > 1 else opcode).removesuffix("_")


def spread(op: Op, operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread | None:
    """Where a part of one operand or result goes in this operator; None where the opcode has no rule."""
    rule = _RULES.get(base_name(op.opcode))
    return None if rule is None else rule(operands, results, slot, part)


def _of(operands: Sequence[Value], results: Sequence[Value], slot: Slot) -> Value:
    return operands[slot] if slot >= 0 else results[-1 - slot]


def _slots(operands: Sequence[Value], results: Sequence[Value]) -> list[tuple[Slot, Value]]:
    return [*enumerate(operands), *((-1 - k, r) for k, r in enumerate(results))]


def _elementwise(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """Shapes are aligned on the right; where one is broadcast over the part it is whole."""
    source = _of(operands, results, slot)
    extent, right = source.shape[part.dim], len(source.shape) - part.dim
    parts = []
    for other, value in _slots(operands, results):
        dim = len(value.shape) - right
        if other != slot and dim >= 0 and value.shape[dim] == extent:
            parts.append((other, Part(dim, part.outer)))
    return Spread(tuple(parts))


def _view(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """The same elements in another shape (aten/src/ATen/TensorUtils.cpp, computeStride)."""
    source = _of(operands, results, slot)
    parts = []
    for other, value in _slots(operands[:1], results):
        if other == slot:
            continue
        found = reshaped(part, source.shape, value.shape)
        if found is None:
            return Spread(barrier="is reshaped across the part")
        parts.append((other, found))
    return Spread(tuple(parts))


def _permute(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    order = permuted(operands[0], results[0])
    if order is None:
        return WHOLE
    if slot == 0:
        return Spread(((-1, Part(order.index(part.dim), part.outer)),))
    return Spread(((0, Part(order[part.dim], part.outer)),))


def _sliced(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """Slices, splits and what joins them again: equal dimensions are one; of equal pieces each is divided."""
    source = _of(operands, results, slot)
    parts = []
    for other, value in _slots(operands, results):
        if other == slot or len(value.shape) != len(source.shape):
            continue
        mine, theirs = source.shape[part.dim], value.shape[part.dim]
        if mine == theirs:
            parts.append((other, part))
        elif (pieces := quotient(mine, theirs)) is not None and pieces == part.outer:
            parts.append((other, Part(part.dim)))
        elif (pieces := quotient(theirs, mine)) is not None and part.outer is ONE:
            parts.append((other, Part(part.dim, pieces)))
        elif (pieces := quotient(mine, theirs)) is not None and part.outer is ONE and (slot < 0) == (len(results) > 1):
            return Spread(barrier="is cut into pieces")
        else:
            return Spread(barrier="is cut into unequal pieces")
    return Spread(tuple(parts))


def _select(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """One index of a dimension is taken, or all of them apart: that dimension is gone from the pieces."""
    whole, piece = (operands[0], results[0]) if len(operands[0].shape) > len(results[0].shape) else (results[0], operands[0])
    gone = next((k for k in range(len(whole.shape)) if (*whole.shape[:k], *whole.shape[k + 1 :]) == piece.shape), None)
    if gone is None:
        return WHOLE
    is_whole = len(_of(operands, results, slot).shape) == len(whole.shape)
    if is_whole and part.dim == gone:
        return WHOLE
    dim = part.dim if not is_whole else part.dim - (part.dim > gone)
    parts = []
    for other, value in _slots(operands, results):
        if other != slot:
            there = dim + (dim >= gone) if len(value.shape) == len(whole.shape) else dim
            parts.append((other, Part(there, part.outer)))
    return Spread(tuple(parts))


def _reduce(partial: bool) -> Rule:
    """A sum over the part is partial; another reduction needs all of it."""

    def rule(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
        kept = kept_dims(operands[0].shape, results[0].shape)
        if slot < 0:
            back = next((k for k, to in enumerate(kept) if to == part.dim), None)
            parts = () if back is None else ((0, Part(back, part.outer)),)
            return Spread((*parts, *(((-1 - k), part) for k in range(len(results)) if -1 - k != slot)))
        to = kept[part.dim]
        if to is None:
            return Spread(partial=tuple(-1 - k for k in range(len(results)))) if partial else WHOLE
        return Spread(tuple((-1 - k, Part(to, part.outer)) for k in range(len(results))))

    return rule


def _einsum(text: str) -> Rule:
    """`mk,kn->mn`: equal letters are one dimension; one that the result has not is summed over."""
    inputs, _, output = text.partition("->")
    specs = [*inputs.split(","), output]

    def rule(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
        letters = [spec[-len(v.shape) :] if v.shape else "" for spec, v in zip(specs, operands, strict=False)]
        letters.append(output)
        tensors = [*operands, results[0]]
        index = slot if slot >= 0 else len(operands)
        letter = letters[index][part.dim]
        parts = []
        for k, value in enumerate(tensors):
            if k == index or letter not in letters[k]:
                continue
            dim = letters[k].index(letter)
            if value.shape[dim] is not ONE:
                parts.append((k if k < len(operands) else -1, Part(dim, part.outer)))
        return Spread(tuple(parts), partial=() if letter in output else (-1,))

    return rule


def _attention(heads: int) -> Rule:
    """Attention kernels: sequences and heads are independent of one another; query and key-value heads are divided together."""

    def rule(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
        def place(value: Value) -> int:
            return heads if len(value.shape) == 4 else 1

        source = _of(operands, results, slot)
        if part.outer is not ONE or part.dim not in (0, place(source)):
            return WHOLE
        parts = []
        for other, value in _slots(operands, results):
            dim = 0 if part.dim == 0 else place(value)
            if other != slot and len(value.shape) >= 3 and value.shape[dim] is not ONE:
                parts.append((other, Part(dim)))
        return Spread(tuple(parts))

    return rule


def _norm(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """Rows are independent, the last dimension is not; in backward the weights' gradients are sums over the rows."""
    source, x = _of(operands, results, slot), operands[0]
    if len(source.shape) < len(x.shape) or part.dim == len(x.shape) - 1:
        return WHOLE
    parts, partial = [], []
    for other, value in _slots(operands, results):
        if other == slot:
            continue
        if len(value.shape) == len(x.shape):
            parts.append((other, part))
        elif other < 0:
            partial.append(other)
    return Spread(tuple(parts), tuple(partial))


def _softmax(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """Over the last dimension, as attention and losses call it."""
    if part.dim == len(_of(operands, results, slot).shape) - 1:
        return WHOLE
    return _elementwise(operands, results, slot, part)


def _embedding(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """weight [V, D] and indices [...] make [..., D]. With a part of the vocabulary the rows of the others are zero: partial."""
    if slot == 0 and part.dim == 0:
        return Spread(partial=(-1,))
    last = len(results[0].shape) - 1
    if slot == 0 or (slot < 0 and part.dim == last):
        return Spread(barrier="is looked up whole")
    return Spread(((1 if slot < 0 else -1, part),))


def _embedding_backward(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    """The gradient [..., D] and indices [...] make [V, D], a sum over all of them."""
    if slot < 0 or (slot == 0 and part.dim == len(operands[0].shape) - 1):
        return WHOLE
    return Spread(((1 - slot, part),), partial=(-1,))


def _whole(operands: Sequence[Value], results: Sequence[Value], slot: Slot, part: Part) -> Spread:
    return WHOLE


_ELEMENTWISE = """
add sub rsub mul div neg pow sqrt rsqrt exp log sin cos tanh sigmoid silu gelu relu abs sign reciprocal erf clamp clamp_min
clamp_max maximum minimum where eq ne lt le gt ge addcmul addcdiv lerp logical_not logical_and logical_or bitwise_and bitwise_or
bitwise_not masked_fill square softplus floor ceil round clone copy _to_copy contiguous detach alias lift_fresh native_dropout
native_dropout_backward silu_backward gelu_backward tanh_backward sigmoid_backward threshold_backward softplus_backward
zeros_like ones_like empty_like full_like zero fill expand bernoulli isinf isnan remainder floor_divide hardtanh leaky_relu elu
"""
_VIEWS = "view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten"
_SLICES = "slice split split_with_sizes chunk narrow cat slice_backward constant_pad_nd"

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_VIEWS.split(), _view),
    **dict.fromkeys(("transpose", "t", "permute", "movedim"), _permute),
    **dict.fromkeys(_SLICES.split(), _sliced),
    **dict.fromkeys(("select", "unbind", "select_backward", "stack"), _select),
    "sum": _reduce(True),
    **dict.fromkeys(
        ("mean", "amax", "amin", "max", "min", "argmax", "linalg_vector_norm", "var", "prod", "any", "all"), _reduce(False)
    ),
    "mm": _einsum("mk,kn->mn"),
    "addmm": _einsum("mn,mk,kn->mn"),
    "bmm": _einsum("bmk,bkn->bmn"),
    "baddbmm": _einsum("bmn,bmk,bkn->bmn"),
    "mv": _einsum("mk,k->m"),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        _attention(1),
    ),
    **dict.fromkeys(("_flash_attn_forward", "_flash_attn_backward"), _attention(2)),
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"), _norm),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"), _softmax
    ),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "cumsum", "topk", "sort"), _whole),
}
