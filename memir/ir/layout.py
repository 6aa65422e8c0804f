"""How a tensor lies in its storage: contiguous strides and the number of elements it reaches over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from memir.ir.size import ONE, ZERO, Size


def product(extents: Iterable[Size]) -> Size:
    """The number of elements of a tensor with these extents."""
    total = ONE
    for extent in extents:
        total = total * extent
    return total


def new_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides that PyTorch gives a new tensor: as `contiguous`, but an extent of 0 counts as 1
    (c10/util/strides.h, `contiguous_strides`)."""
    strides, step = [], ONE
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent if extent.terms else step
    return tuple(reversed(strides))


@lru_cache(maxsize=65536)
def contiguous(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides in elements: the last dimension has 1, every other the product of the extents after it."""
    strides = [ONE] * len(shape)
    for position in range(len(shape) - 2, -1, -1):
        strides[position] = strides[position + 1] * shape[position + 1]
    return tuple(strides)


@lru_cache(maxsize=65536)
def reach(shape: tuple[Size, ...], strides: tuple[Size, ...], offset: Size) -> Size:
    """Elements from the storage's start to the end of the tensor's last element; 0 for an empty tensor.

    offset + sum((extent - 1) * stride) + 1, as torch's `computeStorageNbytes` (aten/src/ATen/EmptyTensor.cpp) counts, for
    extents of at least 1 and strides of at least 0.
    """
    if any(extent is ZERO for extent in shape):
        return ZERO
    total = offset + 1
    for extent, stride in zip(shape, strides, strict=True):
        total = total + (extent - 1) * stride
    return total
