"""Compiled code as eager code: torch.compile and torch.jit.script left out, and modules that are already wrapped unwrapped."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from memir.frontend.origin import shown_path

_CONTEXT_DECORATOR = str(Path("torch", "utils", "_contextlib.py"))


@contextmanager
def eager_only(notes: list[str] | None = None) -> Iterator[None]:
    """Within, whatever is or was compiled runs as plain Python: what memir traces is the eager step.

    `torch.compile` and `torch.jit.script` give back what they are given, and functions compiled earlier run eagerly
    (`torch.compiler.set_stance("force_eager")`, PyTorch 2.6). Each use met is noted in `notes`, for the assumptions.
    """

    def plain(name: str) -> Callable[..., Any]:
        def give_back(model: Any = None, *_: Any, **__: Any) -> Any:
            frame = sys._getframe(1)
            note = f"analyzed as eager: {name} at {shown_path(frame.f_code.co_filename)}:{frame.f_lineno} is left out"
            if notes is not None and note not in notes:
                notes.append(note)
            return (lambda function: function) if model is None else model

        return give_back

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", plain("torch.compile")))
        stack.enter_context(mock.patch.object(torch.jit, "script", plain("torch.jit.script")))
        if "torch._dynamo" in sys.modules:  # only then can anything be compiled already; importing it costs a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def unwrap_compiled(module: nn.Module, assumptions: list[str]) -> nn.Module:
    """The module without torch.compile's wrappers, its submodules too, in place; says so in `assumptions`."""
    found = False
    while (inner := _original(module)) is not None:
        module, found = inner, True
    for submodule in list(module.modules()):
        if getattr(submodule, "_compiled_call_impl", None) is not None:
            submodule._compiled_call_impl = None
            found = True
        for name, child in list(submodule._modules.items()):
            while child is not None and (inner := _original(child)) is not None:
                child, found = inner, True
                submodule._modules[name] = child
    if found:
        assumptions.append("analyzed as eager: the model is wrapped in torch.compile")
    return module


def _original(module: nn.Module) -> nn.Module | None:
    if "torch._dynamo" not in sys.modules:
        return None
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(module, OptimizedModule):
        inner = module._orig_mod
        return inner if isinstance(inner, nn.Module) else None
    return None


def unwrap_no_grad(module: nn.Module, assumptions: list[str]) -> None:
    """Take `torch.no_grad` or `torch.inference_mode` off the model's own forward, as one who trains it must; says so.

    Recognized by the file of the decorator's wrapper (torch/utils/_contextlib.py, `context_decorator`).
    """
    forward = type(module).forward
    code, inner = getattr(forward, "__code__", None), getattr(forward, "__wrapped__", None)
    if code is None or inner is None or not code.co_filename.endswith(_CONTEXT_DECORATOR):
        return
    module.forward = types.MethodType(inner, module)
    assumptions.append(f"the decorator without gradients on {type(module).__name__}.forward is taken off, as training needs")
