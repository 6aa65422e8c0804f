"""What CUDA does differently, imposed on fake cpu tensors: explicit rules of the target, each with its source.

Dropout is in `memir.frontend.composites`.

The GPU is taken to be of compute capability 8.0 or newer. Kernels' workspaces are rules of `memir.ir.opset`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch.nn.attention import SDPBackend, sdpa_kernel

from memir.frontend.record import Recorder

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_SDPA = F.scaled_dot_product_attention  # the one a function mode sees, whatever the module's attribute is meanwhile


def choose_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> str:
    """Which kernel scaled_dot_product_attention takes: flash, efficient or math.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `_fused_sdp_choice_cuda`: the order is flash, efficient, math;
    `can_use_flash_attention` wants a 16-bit dtype, no mask and one head size up to 256 for all three;
    `can_use_mem_efficient_attention` wants aligned head sizes and no grouped heads.
    """
    head, head_v = query.size(-1), value.size(-1)
    if query.dim() != 4:
        return "math"
    if query.dtype in _HALF and attn_mask is None and head == key.size(-1) == head_v and head <= 256:
        return "flash"
    alignment = 8 if query.dtype in _HALF else 4
    grouped = enable_gqa and query.size(-3) != key.size(-3)
    aligned = head % alignment == 0 and head_v % alignment == 0
    if query.dtype in (*_HALF, torch.float32) and aligned and not grouped:
        return "efficient"
    return "math"


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """aten/src/ATen/native/transformers/attention.cpp, `scaled_dot_product_attention`, after the choice of the kernel."""
    kernel = choose_attention(query, key, value, attn_mask, enable_gqa)
    out: torch.Tensor
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    head = query.size(-1)
    if kernel == "flash":
        padding = -head % 8  # `pad_last_dim<8>`
        if padding:
            scale = head**-0.5 if scale is None else scale
            query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head] if padding else out
    if attn_mask is not None:
        attn_mask = _additive_mask(attn_mask, query, key)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _additive_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """attention.cpp: `convert_boolean_attn_mask`, then `preprocess_mask` with `pad_bias<16>`: padded to 16."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype))
    length = mask.size(-1)
    padding = 16 - length % 16
    if padding != 16:
        mask = F.pad(mask, (0, padding))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _layer_norm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """aten/src/ATen/native/cuda/layer_norm_kernel.cu, `layer_norm_cuda`: mean and rstd are fp32 for 16-bit inputs."""
    out, mean, rstd = func(*args, **kwargs)
    recorder.paused += 1
    try:
        return out, *(s.float() if s.dtype in _HALF else s for s in (mean, rstd))
    finally:
        recorder.paused -= 1


HANDLERS: dict[Any, Any] = {aten.native_layer_norm.default: _layer_norm}


@torch.library.custom_op("memir::_fused_rms_norm", mutates_args=())
def _fused_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, num_dims: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA's fused RMS norm: output like x, rstd in fp32 (layer_norm_kernel.cu, `_fused_rms_norm_cuda`)."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@_fused_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, num_dims: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    stats = torch.float32 if x.dtype in _HALF else x.dtype
    kept = x.dim() - num_dims
    return torch.empty_like(x), x.new_empty([*x.shape[:kept], *[1] * num_dims], dtype=stats)


@torch.library.custom_op("memir::_fused_rms_norm_backward", mutates_args=())
def _fused_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the weight (layer_norm_kernel.cu, `_fused_rms_norm_backward_cuda`)."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@_fused_rms_norm_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight) if weight is not None else x.new_empty((0,))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, output[1], *([] if weight is None else [weight]))


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    x, rstd, *weight = ctx.saved_tensors
    dx, dw = _fused_rms_norm_backward(grad, x, rstd, weight[0] if weight else None)
    return dx, dw if weight else None, None, None


_fused_rms_norm.register_autograd(_backward, setup_context=_save)


def _rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """aten/src/ATen/native/layer_norm.cpp, `rms_norm_symint`: the fused kernel on CUDA since torch 2.9, composed before."""
    if torch.__version__ < "2.9":
        return F.rms_norm(input, normalized_shape, weight, eps)
    normalized: torch.Tensor = _fused_rms_norm(input, weight, len(normalized_shape), eps or 0.0)[0]
    return normalized


# What a function mode redirects on CUDA (memir.frontend.functions); its keys are the functions as a mode sees them.
FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {_SDPA: _attention, F.rms_norm: _rms_norm}
