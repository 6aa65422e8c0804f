"""Workspaces of bitsandbytes' operators.

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
_KERNELS = (*_ON_CPU, "dequantize_4bit", "dequantize_scales")


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


RULES: dict[tuple[str, str], Scratch] = {
    **{("cuda", f"bitsandbytes.{name}"): _none for name in _KERNELS},
    **{("cpu", f"bitsandbytes.{name}"): _composed(tensors) for name, tensors in _ON_CPU.items()},
}
