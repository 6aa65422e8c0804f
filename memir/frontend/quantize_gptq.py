"""GPTQ base weights (Frantar et al. 2023) as auto-gptq and gptqmodel keep and compute them, described without the packages.

A layer of [in, out] holds, at b bits and groups of g inputs: qweight int32 [in/32*b, out], qzeros int32 [ceil(in/g), out/32*b],
scales fp16 [ceil(in/g), out], g_idx int32 [in]; the bias in fp16. It dequantizes to an fp16 matrix [in, out] for every use.

- kernel=triton: `QuantLinearFunction` keeps the packed tensors and dequantizes again in backward (auto_gptq and gptqmodel,
  nn_modules/triton_utils/dequant.py, qlinear/qlinear_tritonv2.py; fms-acceleration's `accelerated-peft-autogptq`). fp16 only.
- kernel=torch: the product is torch's own, so autograd keeps the dequantized matrix until the layer's backward (gptqmodel,
  nn_modules/qlinear/torch.py, `TorchQuantLinear._forward`, whose unpacking is compiled to one kernel; gptqmodel's other
  kernels run it too in training). In bf16 the matrix is copied to bf16 first.

Quantized are the linear layers of the decoder layers; everything else stays 16-bit, also norms: PEFT's
`prepare_model_for_kbit_training` widens nothing of a GPTQ model. Adapters: peft/tuners/lora/gptq.py, `GPTQLoraLinear.forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memir.errors import UsageError
from memir.recipe import Quantize

WORD = 32  # bits of an int32, into which weights and zeros are packed
ROUTERS = ("gate", "shared_expert_gate", "router")  # left in 16 bits (gptqmodel, models/definitions: mixtral.py, qwen2_moe.py)


@torch.library.custom_op("memir_gptq::dequantize", mutates_args=())
def dequantize(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor) -> torch.Tensor:
    """The fp16 matrix [in, out]."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@dequantize.register_fake
def _(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor) -> torch.Tensor:
    return scales.new_empty([g_idx.shape[0], scales.shape[1]])


class LinearGptq(nn.Linear):
    """Stands for the packages' layer: the same tensors, the same temporaries."""

    def __init__(self, linear: nn.Module, quantize: Quantize, name: str) -> None:
        weight, bias = linear.weight, getattr(linear, "bias", None)
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape
        if not isinstance(linear, nn.Linear):  # transformers' Conv1D keeps its weight transposed
            rows, columns = columns, rows
        if rows % WORD or columns % WORD:
            raise UsageError(f"--quantize gptq: {name} has {columns} inputs and {rows} outputs, not multiples of {WORD}")
        super().__init__(columns, rows, bias=False, device="meta")
        self.kernel = quantize.kernel
        self.register_parameter("weight", None)
        groups = -(-columns // (quantize.group if quantize.group > 0 else columns))
        self._hold("qweight", (columns // WORD * quantize.bits, rows), torch.int32)
        self._hold("qzeros", (groups, rows // WORD * quantize.bits), torch.int32)
        self._hold("scales", (groups, rows), torch.float16)
        self._hold("g_idx", (columns,), torch.int32)
        del self.bias
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float16))

    def _hold(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))

    def dequantized(self) -> torch.Tensor:
        """The fp16 matrix [in_features, out_features]."""
        matrix: torch.Tensor = dequantize(self.qweight, self.qzeros, self.scales, self.g_idx)
        return matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]."""
        flat, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], self.out_features)
        if self.kernel == "torch":
            out = torch.matmul(flat, self.dequantized().to(x.dtype)).reshape(shape)
            if self.bias is not None:
                out.add_(self.bias)
            return out.to(x.dtype)
        product: torch.Tensor = _Product.apply(flat, self)  # type: ignore[no-untyped-call]
        product = product.half().reshape(shape)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """`QuantLinearFunction`: nothing but the packed weights is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: LinearGptq) -> torch.Tensor:
        ctx.layer = layer
        return torch.matmul(x, layer.dequantized())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.matmul(grads[0], ctx.layer.dequantized().t()), None


def adapted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """peft/tuners/lora/gptq.py, `GPTQLoraLinear.forward`, for active adapters."""
    result = self.base_layer(x)
    for name in self.active_adapters:
        if name not in self.lora_A:
            continue
        given = result.dtype
        x = x.to(self.lora_A[name].weight.dtype)
        result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        result = result.to(given)
    adapted_result: torch.Tensor = result
    return adapted_result
