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


_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_KERNELS: dict[str, dict[Any, Callable[..., torch.Tensor]]] = {
    "cpu": {aten.dropout.default: _dropout_cpu, aten.one_hot.default: _one_hot_cpu},
    "cuda": {aten.dropout.default: _dropout_cuda, aten.one_hot.default: _one_hot_cuda},
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
