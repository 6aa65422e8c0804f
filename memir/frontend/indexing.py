"""`x[:, a:b, ...]` as a real run does it: a slice over the whole of a dimension is left out.

torch/csrc/autograd/python_variable_indexing.cpp and aten/src/ATen/TensorIndexing.h, `applySlice`: the whole slice is
recognized only where its end is known to be the extent, which a symbolic extent hides. The slice that is left in would cost
its backward: zeros of the whole tensor's size.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def get_item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`. Indices other than whole or partial slices, integers, None, ... and integer tensors are PyTorch's."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(_is_whole(item) for item in items) or not all(_is_known(item) for item in items):
        return tensor[index]
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    view, dim = tensor, 0
    gathered: dict[int, torch.Tensor] = {}
    for item in items:
        if item is Ellipsis:
            dim += tensor.dim() - consumed
        elif item is None:
            view, dim = view.unsqueeze(dim), dim + 1
        elif isinstance(item, int):
            view = view.select(dim, item)
        elif isinstance(item, torch.Tensor):
            gathered[dim], dim = item, dim + 1
        else:
            if not _is_whole(item):
                view = aten.slice(view, dim, item.start, item.stop, 1 if item.step is None else item.step)
            dim += 1
    if gathered:
        view = aten.index(view, [gathered.get(i) for i in range(max(gathered) + 1)])
    whole: torch.Tensor = aten.alias(view) if view is tensor else view
    return whole


def _is_whole(item: Any) -> bool:
    if not isinstance(item, slice) or item.stop is not None:
        return False
    return item.start in (None, 0) and item.step in (None, 1) if isinstance(item.start, (int, type(None))) else False


def _is_known(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.dtype == torch.long and item.dim() > 0
    return item is None or item is Ellipsis or isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool))
