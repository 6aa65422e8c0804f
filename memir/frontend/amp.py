"""Autocast as CUDA does it, imposed on fake cpu tensors: the operators that its lists name and the CPU's do not.

Source: aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE (registered
for CUDA in autocast_mode.cpp). The CPU's own lists stay in force beside them; what only they name no language model calls. The
casts of weights that are trained are kept until autocast ends (`cached_cast` there), which PyTorch does alike for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey, DispatchKeySet

aten = torch.ops.aten
_LOWER = "prelu addmv addr mv einsum chain_matmul linalg_multi_dot"
_FP32 = """
__rpow__ acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
native_layer_norm group_norm norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
pdist cdist renorm logsumexp rms_norm
"""
_OPT_DTYPE = {"prod": 1, "softmax": 2, "log_softmax": 2, "cumprod": 2, "cumsum": 2, "sum": 1}  # place of dtype by position
_HALF = (torch.float16, torch.bfloat16)
_EXCLUDED = DispatchKeySet(DispatchKey.AutocastCPU)


def _fp32(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            wide = torch.utils._pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
            return operator(*wide[0], **wide[1])

    return run


def _with_dtype(operator: Any, place: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") or (args[place] if len(args) > place and isinstance(args[place], torch.dtype) else None)
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            if given is None and args[0].dtype in _HALF:
                kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return run


def _lower(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.dtype in (*_HALF, torch.float32) else tensor

        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            narrow = torch.utils._pytree.tree_map_only(torch.Tensor, narrowed, (args, kwargs))
            return operator(*narrow[0], **narrow[1])

    return run


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _kernels() -> Iterator[tuple[Any, Callable[..., Any]]]:
    for name in _FP32.split():
        yield from ((operator, _fp32(operator)) for operator in _overloads(name))
    for name in _LOWER.split():
        yield from ((operator, _lower(operator)) for operator in _overloads(name))
    for name, place in _OPT_DTYPE.items():
        for operator in _overloads(name):
            if any(argument.name == "dtype" for argument in operator._schema.arguments):
                yield operator, _with_dtype(operator, place)


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name, None)  # not every version has all of them
    if packet is None:
        return []
    found = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
    return [operator for operator in found if _has(operator, "AutocastCUDA")]


def _has(operator: Any, key: str) -> bool:
    """Whether this PyTorch has a kernel of the operator for a key; CUDA's autocast is part of every build."""
    name = operator.name()
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _cross_entropy(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """aten/src/ATen/native/LossNLL.cpp, `cross_entropy_loss`: log_softmax is told the dtype of the logits, so that autocast on
    CUDA leaves it 16-bit, and nll_loss widens its result. The CPU's list has cross_entropy_loss itself, in fp32."""
    if target.is_floating_point() or label_smoothing:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return aten.cross_entropy_loss(self, target, weight, reduction, ignore_index, label_smoothing)  # type: ignore[no-any-return]
    scores = torch.log_softmax(self, 0 if self.dim() == 1 else 1, dtype=self.dtype)
    loss: torch.Tensor = aten.nll_loss_nd(scores, target, weight, reduction, ignore_index)
    return loss


@contextmanager
def _asked_without_device() -> Iterator[None]:
    asked = torch.is_autocast_enabled

    def is_autocast_enabled(device_type: str = "cpu") -> bool:
        return asked(device_type)

    def get_autocast_gpu_dtype() -> torch.dtype:
        return torch.get_autocast_dtype("cpu")

    with (
        mock.patch.object(torch, "is_autocast_enabled", is_autocast_enabled),
        mock.patch.object(torch, "get_autocast_gpu_dtype", get_autocast_gpu_dtype),
    ):
        yield


@contextmanager
def cuda_autocast(amp: str) -> Iterator[None]:
    """Within, `torch.autocast("cpu")` casts as `torch.autocast("cuda")` would; nothing happens for "none".

    Code that asks whether autocast is on and names no device means CUDA's (torch/csrc/autograd/init.cpp,
    `is_autocast_enabled`), as peft/tuners/lora/bnb.py and transformers' flash-attn 2 before 5.0 do: it gets the answer for
    the one that is on.
    """
    if amp == "none":
        yield
        return
    kernels = list(_kernels())
    loss = aten.cross_entropy_loss.default
    with torch.library._scoped_library("aten", "IMPL") as library, _asked_without_device():
        for operator, kernel in kernels:
            if not _has(operator, "AutocastCPU"):
                library.impl(operator, kernel, "AutocastCPU")
                operator._dispatch_cache.clear()
        loss.py_kernels[DispatchKey.AutocastCPU] = _cross_entropy  # there is the CPU's: the Python dispatcher finds this first
        loss._dispatch_cache.clear()
        try:
            yield
        finally:
            del loss.py_kernels[DispatchKey.AutocastCPU]
            for operator in (loss, *(operator for operator, _ in kernels)):
                operator._dispatch_cache.clear()
