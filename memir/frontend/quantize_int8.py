"""LLM.int8() base weights (Dettmers et al. 2022) as bitsandbytes keeps and computes them, described without the package.

A layer holds its weights in 8 bits and an fp32 scale a row (SCB). On CUDA its input is quantized by rows, multiplied in int8 to
an int32 product and scaled to fp16; backward dequantizes the weights to the input's dtype. Columns of the input with a value of
6.0 or more are multiplied apart in 16 bits: their number depends on the data, and none is assumed (the paper finds at most 7 of
them in models up to 13B). The layer's input is kept on the autograd function itself and not as a saved tensor: it
lives until the loss is let go, also under checkpointing. On the CPU, in training, both directions dequantize.
Sources, bitsandbytes 0.50.2: nn/modules.py, `Linear8bitLt`, `Int8Params`; autograd/_functions.py, `matmul`, `MatMul8bitLt`,
`MatMul8bitFp`; backends/cuda/ops.py, `int8_vectorwise_quant`, `int8_mm_dequant`; backends/default/ops.py,
`int8_mixed_scaled_mm`, `int8_scaled_mm`; peft/tuners/lora/bnb.py, `Linear8bitLt`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import nn

from memir.errors import UsageError

THRESHOLD = 6.0  # BitsAndBytesConfig.llm_int8_threshold


@torch.library.custom_op("memir_bitsandbytes::int8_vectorwise_quant", mutates_args=())
def int8_vectorwise_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp16 matrix as int8 with an fp32 scale a row; a mask of outliers is made on the way (memir.ir.bitsandbytes)."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@int8_vectorwise_quant.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty([x.shape[0]], dtype=torch.float32)


@torch.library.custom_op("memir_bitsandbytes::int8_linear_matmul", mutates_args=())
def int8_linear_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[rows, in] and [out, in] in int8 to [rows, out] in int32."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@int8_linear_matmul.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty([x.shape[0], weight.shape[0]], dtype=torch.int32)


@torch.library.custom_op("memir_bitsandbytes::int8_mm_dequant", mutates_args=())
def int8_mm_dequant(product: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """An int32 product scaled to fp16."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@int8_mm_dequant.register_fake
def _(product: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(product, dtype=torch.float16)


class Linear8bit(nn.Linear):
    """Stands for bitsandbytes' `Linear8bitLt`: the same tensors, the same temporaries."""

    def __init__(self, linear: nn.Module, on_cuda: bool) -> None:
        weight, bias = linear.weight, getattr(linear, "bias", None)
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape
        if not isinstance(linear, nn.Linear):  # transformers' Conv1D keeps its weight transposed
            rows, columns = columns, rows
        super().__init__(columns, rows, bias=False, device="meta")
        self.on_cuda = on_cuda
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.int8, device="meta"), requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.register_buffer("SCB", torch.empty(rows, device="meta"), persistent=False)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights in `dtype`, [out_features, in_features]; a temporary of the caller."""
        scales = self.SCB
        assert isinstance(scales, torch.Tensor)
        return self.weight.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]; the result has its dtype, and so has the bias from the first forward on."""
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        function = _Int8Product if self.on_cuda else _DequantizedProduct
        product: torch.Tensor = function.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
        return product


class _Int8Product(torch.autograd.Function):
    """`MatMul8bitLt`, on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: Linear8bit) -> torch.Tensor:
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        codes, rows = int8_vectorwise_quant(flat.to(torch.float16))
        output = _scaled_product(codes, rows, bias, layer, x.dtype)
        ctx.layer, ctx.shape, ctx.dtype = layer, shape, x.dtype
        if ctx.needs_input_grad[0]:
            ctx.held = flat  # an attribute: neither saved-tensor hooks nor the end of the node's backward let it go
        return output.reshape(*shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        weight = ctx.layer.dequantized(ctx.dtype)
        return torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape), None, None


def _scaled_product(
    codes: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, layer: Linear8bit, dtype: torch.dtype
) -> torch.Tensor:
    """`int8_scaled_mm`: the int32 product is alive until the result has its dtype; a bias that is not fp16 is added apart."""
    product = int8_linear_matmul(codes, layer.weight)
    scaled: torch.Tensor = int8_mm_dequant(product, rows, layer.SCB)
    if bias is not None and bias.dtype != torch.float16:
        scaled.add_(bias)
    return scaled.to(dtype)


class _DequantizedProduct(torch.autograd.Function):
    """`MatMul8bitFp`, on the CPU in training."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: Linear8bit) -> torch.Tensor:
        weight = layer.dequantized(x.dtype)
        output = F.linear(x, weight, bias)
        ctx.layer, ctx.shape, ctx.dtype, ctx.held = layer, x.shape, x.dtype, x
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Int8Product.backward(ctx, *grads)


def real(linear: nn.Module) -> nn.Module:
    """bitsandbytes' own layer with the weights of this one, for a step that is really run."""
    try:
        import bitsandbytes
    except ImportError:
        raise UsageError("running quantized weights for real needs bitsandbytes", hint="pip install bitsandbytes") from None
    weight, bias = linear.weight, getattr(linear, "bias", None)
    assert isinstance(weight, torch.Tensor)
    matrix = weight.detach() if isinstance(linear, nn.Linear) else weight.detach().t().contiguous()
    rows, columns = matrix.shape
    options = {"bias": bias is not None, "has_fp16_weights": False, "threshold": THRESHOLD, "device": "meta"}
    layer: nn.Module = bitsandbytes.nn.Linear8bitLt(columns, rows, **options)
    if matrix.is_cuda:
        matrix = matrix.cpu()  # quantized on the way to the GPU (`Int8Params.to`)
    layer.weight = bitsandbytes.nn.Int8Params(matrix, requires_grad=False, has_fp16_weights=False).to(weight.device)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def adapted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """peft/tuners/lora/bnb.py, `Linear8bitLt.forward`, for active adapters; no copy is made of the base's result."""
    result = self.base_layer(x)
    for name in self.active_adapters:
        if name not in self.lora_A:
            continue
        down, up = self.lora_A[name], self.lora_B[name]
        converted = not torch.is_autocast_enabled()
        expected = result.dtype
        if converted:
            x = x.to(down.weight.dtype)
        output = up(down(self.lora_dropout[name](x))) * self.scaling[name]
        if converted:
            output = output.to(expected)
        result = result + output
    adapted_result: torch.Tensor = result
    return adapted_result
