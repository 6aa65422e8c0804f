"""PyTorch's composites as its C++ runs them. For symbolic shapes PyTorch has Python decompositions of some composite
operators, and a few of those allocate otherwise than the C++ that a real run takes. They are replaced while a step is
traced, and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decompositions

aten = torch.ops.aten


def _dropout_cpu(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
    """aten/src/ATen/native/Dropout.cpp, `_dropout_impl`: the mask has the input's dtype; without it, the input itself."""
    if p == 0 or not train:
        return input
    noise = torch.empty_like(input).bernoulli_(1 - p)
    noise.div_(1 - p)
    return input * noise


def _dropout_cuda(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
    """aten/src/ATen/native/Dropout.cpp, `dropout`: on CUDA the fused kernel with a bool mask, when training and 0 < p < 1."""
    if p == 0 or not train:
        return input
    if p == 1:
        return _dropout_cpu(input, p, train)
    dropped: torch.Tensor = aten.native_dropout(input, p, train)[0]
    return dropped


def _one_hot_cpu(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """aten/src/ATen/native/Onehot.cpp, `one_hot`: checks the range through min() and max(), then zeros and scatter_."""
    index.min()
    return _one_hot_cuda(index, num_classes)


def _one_hot_cuda(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As `_one_hot_cpu`, without the range check: on CUDA the scatter kernel asserts it."""
    if num_classes == -1:
        num_classes = int(index.max().item()) + 1
    encoded = torch.zeros([*index.shape, num_classes], dtype=index.dtype, device=index.device)
    return encoded.scatter_(-1, index.unsqueeze(-1), 1)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aten/src/ATen/native/LinearAlgebra.cpp, `_matmul_impl`: a batched product is no view of the flat one (`_unsafe_view`), so
    changing it in place costs nothing in backward. The Python decomposition returns a view.
    """
    product: torch.Tensor = decompositions.matmul(a, b)
    return aten._unsafe_view(product, product.shape) if product._is_view() else product


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """aten/src/ATen/native/Linear.cpp, `linear`: one addmm where rows lie together, else the bias is added in place."""
    if bias is None:
        return torch.matmul(x, weight.t())
    if x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    if x.dim() > 2 and x.is_contiguous():
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view([*x.shape[:-1], weight.shape[0]])
    return torch.matmul(x, weight.t()).add_(bias)


def _attention_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """aten/src/ATen/native/transformers/attention.cpp, `_scaled_dot_product_attention_math`: the mask is added in place.

    16-bit inputs are computed in fp32 (Context.h, allowFP16BF16ReductionMathSDP is off). Variables live as long as there: the
    fp32 inputs until the end, the scores until they are replaced by the weights.
    """
    dtype = query.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    wide = (query.float(), key.float(), value.float()) if half else (query, key, value)
    query, key, value = wide
    factor = (query.size(-1) ** -0.5 if scale is None else abs(scale)) ** 0.5
    query = query * (-factor if scale is not None and scale < 0 else factor)
    if is_causal:
        attn_mask = torch.ones((query.size(-2), key.size(-2)), dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype))
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
    scores = query @ (key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        scores.add_(attn_mask)
    scores = torch._safe_softmax(scores, -1)
    if dropout_p > 0:
        scores = torch.dropout(scores, dropout_p, True)
    return (scores @ value).to(dtype), scores.to(dtype)


def _softmax_cuda(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """aten/src/ATen/native/SoftMax.cpp, `softmax`: on CUDA fp16 to fp32 is one kernel, without an fp32 copy of the input."""
    widened = x.dtype == torch.float16 and dtype == torch.float32
    result: torch.Tensor = aten._softmax(x if widened or dtype is None else x.to(dtype), dim, widened)
    return result


def _log_softmax_cuda(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same file, `log_softmax`."""
    widened = x.dtype == torch.float16 and dtype == torch.float32
    result: torch.Tensor = aten._log_softmax(x if widened or dtype is None else x.to(dtype), dim, widened)
    return result


_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_BOTH: dict[Any, Callable[..., Any]] = {
    aten.matmul.default: _matmul,
    aten.linear.default: _linear,
    aten._scaled_dot_product_attention_math.default: _attention_math,
}
_KERNELS: dict[str, dict[Any, Callable[..., Any]]] = {
    "cpu": {aten.dropout.default: _dropout_cpu, aten.one_hot.default: _one_hot_cpu, **_BOTH},
    "cuda": {
        aten.dropout.default: _dropout_cuda,
        aten.one_hot.default: _one_hot_cuda,
        aten.softmax.int: _softmax_cuda,
        aten.log_softmax.int: _log_softmax_cuda,
        **_BOTH,
    },
}


@contextmanager
def cpp_composites(target: str) -> Iterator[None]:
    """Within, the composites allocate as their C++ does on the target ("cpu" or "cuda")."""
    saved: list[tuple[Any, Any, Any]] = []
    for operator, kernel in _KERNELS[target].items():
        for key in _KEYS:
            saved.append((operator, key, operator.py_kernels.get(key)))
            operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, original in saved:
            if original is None:
                del operator.py_kernels[key]
            else:
                operator.py_kernels[key] = original
            operator._dispatch_cache.clear()
