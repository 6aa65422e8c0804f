"""Where an operator comes from: the path of the module that runs and the line of the user's code."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

_TORCH = str(Path(torch.__file__).parent) + os.sep
_LOOP = str(Path(__file__).with_name("loop.py"))
_MEMIR = str(Path(__file__).parents[1]) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = tuple(sorted({sysconfig.get_paths()[k] + os.sep for k in ("purelib", "platlib")}))
_PLUMBING = ("transformers/utils/", "transformers/integrations/", "transformers/modeling_layers.py", "peft/peft_model.py")


class ModuleStack:
    """The path of the innermost module whose forward is running, kept by global module hooks while `active()`.

    Checkpointing calls a layer's forward again inside the engine, without its hooks: there the layer is the parent of the
    module that ran last.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(m): name.removeprefix("base_model.model.") for name, m in root.named_modules()}
        self._stack: list[int] = []
        self.path = ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(id(module))
        self.path = self._names.get(id(module), self.path)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != id(module):
            pass
        self.path = next((self._names[i] for i in reversed(self._stack) if i in self._names), "")
        if not self._stack and torch._C._current_graph_task_id() != -1:
            self.path = self._names.get(id(module), "").rpartition(".")[0]

    def idle(self) -> None:
        """The engine runs an operator of its own: what was recomputed before is over."""
        if not self._stack:
            self.path = ""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watches every module call; removed again on exit."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@lru_cache(maxsize=4096)
def shown_path(filename: str) -> str:
    """A file's path as shown: relative to site-packages or to the working directory, where it lies in one of them."""
    for site in _SITE:
        if filename.startswith(site):
            return filename[len(site) :].replace(os.sep, "/")
    try:
        return Path(filename).resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return Path(filename).name


@lru_cache(maxsize=4096)
def _rank(filename: str) -> int:
    """0: the user's code, 1: a library's plumbing, 2: PyTorch's optimizer code, 3: never shown."""
    if filename.startswith(_TORCH):
        inside = filename[len(_TORCH) :]
        return 2 if inside.startswith("optim" + os.sep) and not inside.endswith("optimizer.py") else 3
    in_site = filename.startswith(_SITE)
    if filename.startswith((_MEMIR, "<")) or (filename.startswith(_STDLIB) and not in_site):
        return 3
    return 1 if shown_path(filename).startswith(_PLUMBING) else 0


def is_users(filename: str) -> bool:
    """Whether a file is the user's code (a model's), not PyTorch's, Python's or memir's."""
    return _rank(filename) == 0


def source_line(frame: FrameType | None) -> str:
    """`model.py:42` of the innermost frame that is the user's code; a library's or the optimizer's line if there is none.

    Frames outside of memir's own loop called memir and are not the model's.
    """
    best, best_rank = "", 3
    while frame is not None and frame.f_code.co_filename != _LOOP:
        rank = _rank(frame.f_code.co_filename)
        if rank < best_rank:
            best, best_rank = f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}", rank
            if rank == 0:
                break
        frame = frame.f_back
    return best
