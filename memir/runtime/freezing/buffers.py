"""A CPU tensor's memory as a Python buffer, and back, without numpy."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor, nn


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor: a view, which keeps the tensor alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("bytes_of takes a contiguous CPU tensor")
    array: Any = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def digest_of(tensor: Tensor) -> bytes:
    """A digest of a tensor's values, wherever it lies and however it is laid out."""
    plain = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(digest_size=16)
    if plain.numel():
        digest.update(bytes_of(plain))
    return digest.digest()


def fingerprint(model: nn.Module, frozen: list[nn.Module], cut: int, late: tuple[str, ...]) -> str:
    """What a cached activation depends on besides the sample, as hexadecimal text.

    The cut; all parameters that do not train, and the buffers (rotary tables), but those whose names begin with one of `late`,
    the layers behind the cut: values, shapes and dtypes; the frozen modules as they print themselves (classes, sizes,
    epsilons); the numbers of a configuration (a window, a scale).
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"cut {cut}\n".encode())
    for module in frozen:
        digest.update(f"{module!r}\n".encode())
    config: Any = getattr(model, "config", None)
    plain = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})
    digest.update(repr(_numbers(plain)).encode())
    fixed = [item for item in model.named_parameters() if not item[1].requires_grad]
    for name, tensor in (*fixed, *model.named_buffers()):
        if late and name.startswith(late):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(digest_of(tensor))
    return digest.hexdigest()


def _numbers(value: Any) -> Any:
    """Numbers and lists or dictionaries of them; flags and texts, which trainers change (use_cache), are left out."""
    if isinstance(value, dict):
        found = {str(key): _numbers(item) for key, item in sorted(value.items(), key=lambda item: str(item[0]))}
        return {key: item for key, item in found.items() if item not in (None, {}, [])}
    if isinstance(value, list | tuple):
        return [item for item in map(_numbers, value) if item is not None]
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def filled(tensors: list[Tensor], length: int) -> Tensor:
    """[B, length, H] of B tensors [n, H] with n <= length; zeros behind each, where its row is padding."""
    first = tensors[0]
    batch = torch.zeros((len(tensors), length, *first.shape[1:]), dtype=first.dtype)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: tensor.shape[0]] = tensor
    return batch
