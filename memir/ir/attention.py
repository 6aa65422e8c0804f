"""Workspaces of CUDA's attention kernels: bytes that one takes beside its results, from operands of shape [B, H, S, D].

The kernels that are chosen by shape are those of compute capability 8.0 and 9.0. Others have tiles of other sizes: on GPUs with
less shared memory (7.5, 8.6, 8.9, 12.0) `efficient` with heads of 65 to 128 adds up to 13 MiB (`_staged`).
"""

from __future__ import annotations

from collections.abc import Sequence

from memir.ir.core import Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.size import ONE, ZERO, Size, ceil_div

_HALF = ("bf16", "f16")
_FLOAT = 4  # bytes of an fp32


def flash_backward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp, `mha_bwd`; attention_backward.cu.

    softmax_d [B, H, S'] and dq_accum [B, S', H, D'] in fp32 with S' = S rounded up to 128 and D' = D rounded up to 32 (to 256
    above 192); with grouped heads, dk and dv of all heads; a copy of the gradient and of the output where they do not lie as
    [B, S, H, D] (`_flash_attention_backward`).
    """
    grad, query, key, _, out = operands[:5]
    batch, heads, length, head = query.shape
    return _accumulators(batch, length, heads, head, key, key.shape[2], key.shape[1]) + _copy_of(grad) + _copy_of(out)


def flash_attn_backward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """The package's: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp, `mha_bwd`; tensors are [B, S, H, D]."""
    _, query, key = operands[:3]
    batch, length, heads, head = query.shape
    return _accumulators(batch, length, heads, head, key, key.shape[1], key.shape[2])


def _accumulators(batch: Size, length: Size, heads: Size, head: Size, key: Value, keys: Size, key_heads: Size) -> Size:
    """`mha_bwd`'s softmax_d, dq_accum and, with grouped heads, dk and dv of all heads."""
    rounded = ceil_div(length, 128) * 128
    head_rounded = Size.of(256) if _width(head) > 192 else ceil_div(head, 32) * 32
    total = (batch * heads * rounded + batch * rounded * heads * head_rounded) * _FLOAT
    return total if key_heads == heads else total + 2 * batch * keys * heads * head * ITEMSIZE[key.dtype]


def efficient_forward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """attention.cu, `_efficient_attention_forward`: the output once more in fp32 where the kernel cannot keep it in registers.

    mem_eff_attention/kernel_forward.h, `kNeedsOutputAccumulatorBuffer`: 16-bit inputs with values of more than 128 a head.
    """
    query, value = operands[0], operands[2]
    batch, heads, length, _ = query.shape
    if query.dtype not in _HALF or _width(value.shape[3]) <= 128:
        return ZERO
    return batch * heads * length * value.shape[3] * _FLOAT


def efficient_backward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """attention_backward.cu, `_efficient_attention_backward`: delta, workspace, a copy of a gradient that is not [B, S, H, D].

    mem_eff_attention/kernel_backward.h, `workspace_size`: dQ in fp32 in tiles of I x J, each with 16 bytes more
    (`GradQTempStorage`), and `_staged`. For fp32 delta is made of gradient * output, its sum, and the sum transposed, before
    the workspace: whichever of the two is more in a whole tile, since a maximum of both would leave a formula of many pieces.
    """
    grad, query, _, value = operands[:4]
    batch, heads, length, head = query.shape
    half = query.dtype in _HALF
    rows, columns = _tile(half, max(_width(head), _width(value.shape[3])))
    delta = batch * heads * length * _FLOAT
    tiles = ceil_div(length, rows) * ceil_div(head, columns)
    workspace = batch * heads * tiles * (rows * columns * _FLOAT + 16)
    if half:
        total = delta + workspace + _staged(query, value, rows, columns)
    elif _width(value.shape[3]) >= -(-_width(head) // columns) * columns:
        total = delta * value.shape[3] + 2 * delta
    else:
        total = delta + workspace
    return total + _copy_of(grad)


def _tile(half: bool, width: int) -> tuple[int, int]:
    """kernels/cutlassB.h, `dispatch_cutlassB_bf16_sm80` and its kin: queries and keys of a block."""
    if width <= 64:
        return 64, 64
    return (128, 128) if half and width <= 128 else (128, 64)


def _staged(query: Value, value: Value, rows: int, columns: int) -> Size:
    """dK and dV of the keys in work in fp32, where the block is narrower than a head (kernel_backward.h, `kNeedsAccumGradK`).

    One block of keys for each sequence and head. PyTorch splits the keys where B * H is at most 100 (`num_splits_key`: so often
    that B * H * splits stays within 200), which takes up to 13 MiB for each 128 of a head more; it is not counted, since the
    size that follows is no polynomial and would leave a formula of many pieces.
    """
    head, head_v = query.shape[3], value.shape[3]
    if max(_width(head), _width(head_v)) <= rows:
        return ZERO
    width = ceil_div(head, rows) * rows + ceil_div(head_v, rows) * rows
    return query.shape[0] * query.shape[1] * width * columns * _FLOAT


def _copy_of(value: Value) -> Size:
    """The bytes of `value.transpose(1, 2).contiguous()`: none where [B, H, S, D] lies in memory as [B, S, H, D]."""
    expected = ONE
    for place in (3, 1, 2, 0):
        if value.shape[place] != ONE and value.strides[place] != expected:
            return product(value.shape) * ITEMSIZE[value.dtype]
        expected = expected * value.shape[place]
    return ZERO


def _width(head: Size) -> int:
    """A head's size; one that is a symbol counts as wider than any."""
    return head.constant if head.is_constant else 65536
