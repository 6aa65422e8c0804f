"""Autocast as CUDA does it, imposed on fake cpu tensors: the operators that its lists name and the CPU's do not.

Source: aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE (registered
for CUDA in autocast_mode.cpp). The CPU's own lists stay in force beside them; what only they name no language model calls. The
casts of weights that are trained are kept until autocast ends (`cached_cast` there), which PyTorch does alike for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

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
    aten = torch.ops.aten
    for name in _FP32.split():
        yield from ((operator, _fp32(operator)) for operator in _overloads(aten, name))
    for name in _LOWER.split():
        yield from ((operator, _lower(operator)) for operator in _overloads(aten, name))
    for name, place in _OPT_DTYPE.items():
        for operator in _overloads(aten, name):
            if any(argument.name == "dtype" for argument in operator._schema.arguments):
                yield operator, _with_dtype(operator, place)


def _overloads(aten: Any, name: str) -> list[Any]:
    packet = getattr(aten, name, None)  # not every version has all of them
    if packet is None:
        return []
    found = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
    return [operator for operator in found if torch._C._dispatch_has_kernel(operator.name())]  # some are of TorchScript alone


@contextmanager
def cuda_autocast(amp: str) -> Iterator[None]:
    """Within, `torch.autocast("cpu")` casts as `torch.autocast("cuda")` would; nothing happens for "none"."""
    if amp == "none":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        for operator, kernel in _kernels():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "AutocastCPU"):
                library.impl(operator, kernel, "AutocastCPU")
                operator._dispatch_cache.clear()
        try:
            yield
        finally:
            for operator, _ in _kernels():
                operator._dispatch_cache.clear()
