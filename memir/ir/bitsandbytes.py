"""Workspaces of the operators of bitsandbytes and GPTQ.

On CUDA each is one kernel that needs nothing beside its operands (csrc/kernels.cu). On the CPU (0.50.2, backends/cpu/ops.py,
`_optimizer_update_32bit_cpu`, `_optimizer_update_8bit_blockwise_cpu`) an update is composed of tensor operators in fp32, and
its temporaries are counted here as the operator's workspace: as many fp32 tensors of the parameter's size as are alive at once,
one more where the parameter is 16-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memir.ir.core import Value
from memir.ir.size import ONE, ZERO, Size

Scratch = Callable[[Sequence[Value], Sequence[Value]], Size]

_ON_CPU = {  # fp32 tensors alive at once: the gradient scaled, states in fp32, the terms of the update
    "adam32bit": 3,
    "lion32bit": 3,
    "rmsprop32bit": 3,
    "adam_8bit_blockwise": 5,
    "lion_8bit_blockwise": 5,
    "rmsprop_8bit_blockwise": 3,
}
_KERNELS = (*_ON_CPU, "dequantize_4bit", "dequantize_scales", "int8_linear_matmul", "int8_mm_dequant")


def _none(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    return ZERO


def _composed(tensors: int) -> Scratch:
    def workspace(operands: Sequence[Value], results: Sequence[Value]) -> Size:
        parameter = operands[1]
        count = ONE
        for extent in parameter.shape:
            count = count * extent
        return count * 4 * (tensors + (parameter.dtype != "f32"))

    return workspace


def _outlier_mask(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """backends/cuda/ops.py, `int8_vectorwise_quant`: the absolute values in fp16, and their comparison with the threshold."""
    rows, columns = operands[0].shape
    return rows * columns * 3


RULES: dict[tuple[str, str], Scratch] = {
    ("cuda", "gptq.dequantize"): _none,
    ("cuda", "bitsandbytes.int8_vectorwise_quant"): _outlier_mask,
    **{("cuda", f"bitsandbytes.{name}"): _none for name in _KERNELS},
    **{("cpu", f"bitsandbytes.{name}"): _composed(tensors) for name, tensors in _ON_CPU.items()},
}
