"""What CUDA does differently, imposed on fake cpu tensors: explicit rules of the target, each with its source.

Attention is in `memir.frontend.attention`, dropout in `memir.frontend.composites`; kernels' workspaces are rules of
`memir.ir.opset`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)

from memir.frontend.attention import attention_of
from memir.frontend.record import Recorder
from memir.recipe import Recipe

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_SDPA = F.scaled_dot_product_attention  # the one a function mode sees, whatever the module's attribute is meanwhile


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


def functions(recipe: Recipe) -> dict[Any, Callable[..., torch.Tensor]]:
    """What a function mode redirects on CUDA (memir.frontend.functions); its keys are the functions as a mode sees them."""
    return {_SDPA: attention_of(recipe), F.rms_norm: _rms_norm}
