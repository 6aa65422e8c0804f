"""What a checkpointed stretch of the forward keeps: the arguments it was called with, until its last saved tensor is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import checkpoint as library

_DEPTH = 8  # of containers within arguments: a tuple in a dictionary in a partial, in the closure


@contextmanager
def checkpointed_inputs(note: Callable[[list[torch.Tensor]], None]) -> Iterator[None]:
    """Tells `note` the tensors that a checkpoint holds, when its forward begins.

    torch/utils/checkpoint.py, `_checkpoint_without_reentrant_generator`: the frame has the positional arguments
    (`save_inputs`; before torch 2.12 through `_NoopSaveInputs`) and a closure that runs the function with its keyword
    arguments again; the hooks of every tensor that is saved within keep the frame.
    """
    hook: Any = library._checkpoint_hook
    original = hook.__init__

    def __init__(self: Any, frame: Any) -> None:  # noqa: N807 (it stands in for one)
        held: list[torch.Tensor] = []
        saver = getattr(frame, "input_saver", None)
        _collect([cell.cell_contents for cell in frame.recompute_fn.__closure__ or () if _filled(cell)], held, _DEPTH)
        _collect([getattr(frame, "saved_args", ()), getattr(saver, "saved_tensors", ())], held, _DEPTH)
        note(held)
        original(self, frame)

    hook.__init__ = __init__
    try:
        yield
    finally:
        hook.__init__ = original


@contextmanager
def reentrant_gradients(note: Callable[[list[torch.Tensor], bool], None]) -> Iterator[None]:
    """Tells `note` the gradients that a reentrant checkpoint's backward is called with, when it begins and when it ends.

    torch/utils/checkpoint.py, `CheckpointFunction.backward` (`args`): they live until it returns, so that the engine within
    adds nothing into them.
    """
    function: Any = library.CheckpointFunction
    original = function.backward

    def backward(ctx: Any, *args: Any) -> Any:
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        note(given, True)
        try:
            return original(ctx, *args)
        finally:
            note(given, False)

    function.backward = staticmethod(backward)
    try:
        yield
    finally:
        function.backward = staticmethod(original)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (it raises where nothing is in it)
    except ValueError:
        return False
    return True


def _collect(tree: Any, held: list[torch.Tensor], depth: int) -> None:
    if isinstance(tree, torch.Tensor):
        held.append(tree)
    elif depth and isinstance(tree, tuple | list):
        for item in tree:
            _collect(item, held, depth - 1)
    elif depth and isinstance(tree, dict):
        _collect(list(tree.values()), held, depth)
    elif depth and isinstance(tree, partial):
        _collect([tree.args, tree.keywords], held, depth - 1)
    elif type(tree).__name__ == "SavedTensor" and hasattr(tree, "unpack"):
        held.append(tree.unpack())
