"""Base weights that are quantized: which layers, and bitsandbytes' 4-bit ones (QLoRA, Dettmers et al. 2023), described.

8-bit ones are in `quantize_int8`, GPTQ's in `quantize_gptq`.

A quantized linear layer holds packed weights (two a byte), one scale for 64 weights in fp32, or with double quantization in
8 bits with one fp32 scale for 256 of them. Its weights are dequantized for every use, in forward and in backward.
Sources: bitsandbytes/functional.py, `quantize_4bit`, `dequantize_4bit`; bitsandbytes/nn/modules.py, `Linear4bit`;
bitsandbytes/autograd/_functions.py, `MatMul4Bit`; peft/tuners/lora/bnb.py, `Linear4bit`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import nn

from memir.errors import UsageError
from memir.frontend import quantize_gptq, quantize_int8
from memir.frontend.loaded import LoadedModel
from memir.frontend.quantize_gptq import LinearGptq
from memir.frontend.quantize_int8 import Linear8bit
from memir.recipe import Quantize

BLOCK = 64  # weights a scale (`quantize_4bit`, blocksize)
_NARROWED = ("lm_head", "embed_tokens", "wte", "wpe")
BLOCK_OF_SCALES = 256  # scales that share one, with double quantization (`quantize_4bit`, compress_statistics)


@torch.library.custom_op("memir_bitsandbytes::dequantize_scales", mutates_args=())
def dequantize_scales(scales: torch.Tensor, scales_of_scales: torch.Tensor) -> torch.Tensor:
    """8-bit scales to fp32 (`dequantize_blockwise`; the offset is added in place)."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@dequantize_scales.register_fake
def _(scales: torch.Tensor, scales_of_scales: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(scales, dtype=torch.float32)


@torch.library.custom_op("memir_bitsandbytes::dequantize_4bit", mutates_args=())
def dequantize_4bit(packed: torch.Tensor, scales: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Packed weights and fp32 scales to a matrix of `shape` in `dtype`."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@dequantize_4bit.register_fake
def _(packed: torch.Tensor, scales: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(shape, dtype=dtype)


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' layer of that name: the same tensors, the same temporaries."""

    def __init__(self, linear: nn.Module, quantize: Quantize) -> None:
        weight, bias = linear.weight, getattr(linear, "bias", None)
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape
        if not isinstance(linear, nn.Linear):  # transformers' Conv1D keeps its weight transposed
            rows, columns = columns, rows
        super().__init__(columns, rows, bias=False, device="meta")
        self.compute_dtype = self.weight_dtype = weight.dtype
        count = rows * columns
        blocks = -(-count // BLOCK)
        self.weight = nn.Parameter(torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self._hold("code", torch.empty(16, device="meta"))  # the 16 values of nf4 or fp4, made for every layer
        if not quantize.double:
            self._hold("absmax", torch.empty(blocks, device="meta"))
            return
        self._hold("absmax", torch.empty(blocks, dtype=torch.uint8, device="meta"))
        self._hold("absmax_of_absmax", torch.empty(-(-blocks // BLOCK_OF_SCALES), device="meta"))
        self._hold("absmax_code", torch.empty(256, device="meta"))  # older versions share one
        self._hold("offset", torch.empty((), device="meta"))

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def dequantized(self) -> torch.Tensor:
        """The weights in the dtype they were loaded in, [out_features, in_features]; a temporary of the caller."""
        scales = self.absmax
        if scales.dtype == torch.uint8:
            scales = dequantize_scales(scales, self.absmax_of_absmax)
        matrix: torch.Tensor = dequantize_4bit(self.weight, scales, [self.out_features, self.in_features], self.weight_dtype)
        return matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] in any dtype; computed in the dtype of the weights, returned in that of x.

        The bias has that dtype too: bitsandbytes' layer gives it the compute dtype in its first forward, for good.
        """
        given = x.dtype
        x = x.to(self.compute_dtype)
        product: torch.Tensor = _Product.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
        return product.to(given)


class _Product(torch.autograd.Function):
    """`MatMul4Bit`: nothing but the packed weights is kept for backward, which dequantizes them again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: Linear4bit) -> torch.Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return torch.matmul(grad, ctx.layer.dequantized().to(grad.dtype)), None, None


def quantize_linear_layers(loaded: LoadedModel, quantize: Quantize, target: str) -> None:
    """Puts a quantized layer in the place of every linear layer but the output head, freezes all, and widens the rest to fp32.

    Which layers stay: transformers/quantizers/base.py, `get_keys_to_not_convert`; GPTQ takes those of the decoder layers. The
    widening (unless `keep`, and never with GPTQ) is peft/utils/other.py, `prepare_model_for_kbit_training`; with `trl` what is
    no norm and one of `_NARROWED` is bf16 again (trl/trainer/utils.py, `peft_module_casting_to_bf16`, release 0.13). UsageError
    where there is nothing to quantize.
    """
    module = loaded.module
    kept = _kept_in_full(module)
    inside = tuple(f"{path}." for path in loaded.layers) if quantize.kind == "gptq" else ("",)
    found = [
        (name, layer)
        for name, layer in module.named_modules()
        if (type(layer) is nn.Linear or type(layer).__name__ == "Conv1D") and name not in kept and name.startswith(inside)
    ]
    routers = quantize_gptq.ROUTERS if quantize.kind == "gptq" else ()
    found = [(name, layer) for name, layer in found if name and name.rpartition(".")[2] not in routers]
    if not found:
        raise UsageError(
            f"--quantize: {loaded.name} has no linear layer that could be quantized",
            where=loaded.source,
            hint="nn.Linear and transformers' Conv1D are taken, and the output head is left as it is",
        )
    for name, layer in found:
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, _quantized(layer, quantize, target, name))
    if quantize.double and isinstance(module.get_submodule(found[0][0]), Linear4bit):
        table = torch.empty(256, device="meta")  # bitsandbytes' own (`quantize_blockwise`, name2qmap), which the layers copy
        module.register_buffer("bitsandbytes_table", table, persistent=False)
    if quantize.kind != "gptq":
        flag = "is_loaded_in_8bit" if quantize.kind == "int8" else "is_loaded_in_4bit"
        setattr(module, flag, True)  # by this PEFT knows which adapters it has to inject
    if quantize.kind == "int8" and target == "cuda":
        loaded.assumptions.append("int8: no column of a layer's input holds an outlier (6.0 or more); it depends on the data")
    narrow = {id(layer.bias) for layer in module.modules() if isinstance(layer, Linear4bit) and layer.bias is not None}
    if quantize.trl:
        narrow |= {id(p) for name, p in module.named_parameters() if _narrowed(name, module)}
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        floats = parameter.dtype in (torch.float16, torch.bfloat16) and not hasattr(parameter, "quant_state")
        if not quantize.keep and quantize.kind != "gptq" and floats and id(parameter) not in narrow:
            parameter.data = parameter.data.float()


def _narrowed(name: str, module: nn.Module) -> bool:
    """Whether TRL makes the parameter bf16 again: its module's name says so, and it is no norm."""
    owner = name.rpartition(".")[0]
    is_norm = "norm" in owner or isinstance(module.get_submodule(owner), nn.LayerNorm)
    return not is_norm and any(word in owner for word in _NARROWED)


def _quantized(layer: nn.Module, quantize: Quantize, target: str, name: str) -> nn.Module:
    """What stands in the place of a linear layer: described where there are no weights, the package's own otherwise."""
    assert isinstance(layer.weight, torch.Tensor)
    described = layer.weight.is_meta
    if quantize.kind == "gptq":
        if not described:
            raise UsageError("--quantize gptq: such weights are made from data, and cannot be run with random ones")
        return LinearGptq(layer, quantize, name)
    if quantize.kind == "int8":
        return Linear8bit(layer, target == "cuda") if described else quantize_int8.real(layer)
    return Linear4bit(layer, quantize) if described else _real(layer, quantize)


def _real(linear: nn.Module, quantize: Quantize) -> nn.Module:
    """bitsandbytes' own layer with the weights of this one, for a step that is really run."""
    try:
        import bitsandbytes
    except ImportError:
        raise UsageError("running quantized weights for real needs bitsandbytes", hint="pip install bitsandbytes") from None
    weight, bias = linear.weight, getattr(linear, "bias", None)
    assert isinstance(weight, torch.Tensor)
    matrix = weight.detach() if isinstance(linear, nn.Linear) else weight.detach().t().contiguous()
    layer: nn.Module = bitsandbytes.nn.Linear4bit(
        matrix.shape[1],
        matrix.shape[0],
        bias=bias is not None,
        compute_dtype=weight.dtype,
        compress_statistics=quantize.double,
        quant_type=quantize.kind,
        device=weight.device,
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        matrix, requires_grad=False, compress_statistics=quantize.double, quant_type=quantize.kind, module=layer
    ).to(weight.device)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _kept_in_full(module: nn.Module) -> set[str]:
    """Names of modules that are not quantized: the output head, what shares its weight with another, the last one."""
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    kept = {name for names in owners.values() if len(names) > 1 for name in names}
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if head is None:
        kept |= {name.rpartition(".")[0] for name, _ in list(module.named_parameters())[-1:]}
    return kept | {name for name, submodule in module.named_modules() if submodule is head}


def adapt_forward(module: nn.Module) -> None:
    """Adapters on quantized layers compute as PEFT's own for them do; on 4-bit layers the base's result is copied first."""
    for layer in module.modules():
        for kind, adapted in _ADAPTED.items():
            if isinstance(getattr(layer, "base_layer", None), kind):
                setattr(layer, "forward", types.MethodType(adapted, layer))  # noqa: B010 (a method of one object)


def _adapted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """peft/tuners/lora/bnb.py, `Linear4bit.forward`, for one active adapter."""
    result = self.base_layer(x).clone()
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
    adapted: torch.Tensor = result
    return adapted


_ADAPTED: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    Linear4bit: _adapted,
    Linear8bit: quantize_int8.adapted,
    LinearGptq: quantize_gptq.adapted,
}


def num_elements(module: nn.Module) -> tuple[int, int]:
    """Parameters of a module, and those that are trained; packed ones count as what they stand for."""
    total = sum(p.numel() for p in module.parameters())
    for layer in module.modules():
        if isinstance(layer, Linear4bit):
            total += layer.in_features * layer.out_features - layer.weight.numel()
        elif isinstance(layer, LinearGptq):
            total += layer.in_features * layer.out_features + (0 if layer.bias is None else layer.out_features)
    return total, sum(p.numel() for p in module.parameters() if p.requires_grad)
