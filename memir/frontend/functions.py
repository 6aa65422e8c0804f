"""Calls that fake tensors or the CPU answer otherwise than a real run on the target: a function mode redirects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from memir.frontend import cuda
from memir.frontend.indexing import get_item
from memir.recipe import Recipe


@contextmanager
def target_functions(recipe: Recipe) -> Iterator[None]:
    """Within, the functions of the recipe's target stand in for PyTorch's, under backward too, where checkpointing recomputes.

    `Tensor.backward` is itself a call that a function mode sees, and a mode is off while it handles one
    (torch/overrides.py, `handle_torch_function`): so it is switched on again around autograd's engine.
    """
    functions = _Redirected({torch.Tensor.__getitem__: get_item, **(cuda.functions(recipe) if recipe.target == "cuda" else {})})
    engine = vars(torch.autograd)["_engine_run_backward"]

    def run(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return engine(*args, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", run), functions:
        yield


class _Redirected(TorchFunctionMode):
    def __init__(self, table: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.table.get(func, func)(*args, **(kwargs or {}))
