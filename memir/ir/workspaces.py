"""Workspaces of CUDA's norms, embeddings and reductions: bytes that a kernel takes beside its results."""

from __future__ import annotations

from collections.abc import Sequence

from memir.ir.core import Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.size import ONE, ZERO, Size

_INDEX = 8  # bytes of an int64
_FLOAT = 4  # bytes of an fp32, in which 16-bit numbers are added up
_HALF = ("bf16", "f16")
_WARP = 32
_THREADS_OF_BLOCK = 512  # Reduce.cuh, `mnt_wrapper::MAX_NUM_THREADS`


def embedding_backward(count: int, rows: int, width: int, dtype: str) -> int:
    """Bytes that the gradient of a table [rows, width] takes for `count` indices beside it; told, not counted, as `shared_sum`.

    Embedding.cu, `embedding_dense_backward_cuda`; EmbeddingBackwardKernel.cu, `embedding_backward_cuda_kernel`. Above 3,072
    indices: the sorted indices, their order, the offset of each segment (a row of the table that is used); for the most
    segments there can be, two numbers each; for pieces of 10 rows of them, an offset and a row of sums in fp32.
    """
    if count <= 3072:
        return 0
    segments = min(count, rows)
    accumulated = _FLOAT if dtype in _HALF else ITEMSIZE[dtype]
    return (3 * count + 2 * segments + 2) * _INDEX + (count // 10 + segments) * (_INDEX + width * accumulated)


def foreach_norm(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """ForeachReduceOp.cu, `foreach_tensor_norm_cuda`: for each tensor one fp32 for each chunk of the largest.

    Chunks are of 65,536 elements (MultiTensorApply.cuh, `kChunkSize`).
    """
    chunks = [-(-size.constant // 65536) for size in (product(value.shape) for value in operands) if size.is_constant]
    return Size.of(_FLOAT * len(operands) * max(chunks, default=1))


def norm_backward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """layer_norm_kernel.cu, `LayerNormBackwardKernelImpl`, of layer norm and RMS norm: the gradient where it is not contiguous.

    Partial sums of the weights' gradients (`LaunchGammaBetaBackwardCUDAKernel`) are made above 65,536 rows of a width that
    leaves half of the multiprocessors idle: at most 4 MiB in fp32 for each of weight and bias, which is not counted.
    """
    return _copy_of(operands[0])


def _copy_of(value: Value) -> Size:
    """The bytes of `value.contiguous()`: none where it is."""
    expected = ONE
    for extent, stride in zip(reversed(value.shape), reversed(value.strides), strict=True):
        if extent != ONE and stride != expected:
            return product(value.shape) * ITEMSIZE[value.dtype]
        expected = expected * extent
    return ZERO


def shared_sum(rows: int, width: int, dtype: str, sms: int, threads_of_sm: int = 2048) -> int:
    """Bytes that a sum over all rows of [rows, width] takes beside its result, as bias gradients are made.

    Reduce.cuh, `setReduceConfig` and `ReduceConfig::global_memory_size`: several blocks share a column, and their partial
    sums are allocated once more for each thread across (32) and each element of a vector (4): 100 to 150 MiB on large GPUs.
    It is no polynomial in the rows and would leave a formula of many pieces, so it is told beside the figures
    (`memir.frontend.uncounted`). Sums over the last dimension stay within a block; one over everything takes a few KiB.
    """
    vector = next(n for n in (4, 2, 1) if width % n == 0)
    threads = _THREADS_OF_BLOCK // vector
    across = min(_power_of_two(width // vector), _WARP)
    down = min(_power_of_two(rows), threads // across)
    across = min(_power_of_two(width // vector), threads // down)
    grid = -(-(width // vector) // across)
    target = sms * (threads_of_sm // (across * down))
    values = -(-rows // down)  # of a thread
    if values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    accumulated = _FLOAT if dtype in (*_HALF, "f32") else _INDEX
    return accumulated * width * blocks * across * vector if blocks > 1 else 0


def summed(source: Value, result: Value) -> tuple[Size, int]:
    """Rows and width of a tensor whose rows are added up; a width of 0 where it is another reduction."""
    last = source.shape[-1] if source.shape else ONE
    kept = [extent for extent in result.shape if extent != ONE]
    if len(source.shape) < 2 or not last.is_constant or source.strides[-1] != ONE or kept != [last]:
        return ZERO, 0
    return product(source.shape[:-1]), last.constant


def _power_of_two(number: int) -> int:
    """The largest one that is not above the number (`last_pow2`)."""
    return 1 << (max(number, 1).bit_length() - 1)
