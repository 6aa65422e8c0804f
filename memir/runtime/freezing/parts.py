"""The parts of a model that freezing needs: its layers, and what runs before the first of them.

The layers are found as everywhere in memir (`memir.frontend.load_layers.decoder_layers`). What comes before them is not told
by names or by the order of registration (OPT registers its last norm first): it is read off one real forward pass, from the
autograd graph and from the order in which modules ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memir.errors import UsageError
from memir.frontend.load_layers import decoder_layers


@dataclass(frozen=True, slots=True)
class Before:
    """What the first layer's input is made of. Names are those of `named_parameters` and `named_modules`."""

    parameters: tuple[str, ...]  # trainable, reach the first layer's input: the embedding's
    tied: tuple[str, ...]  # those of them that the model uses again after its layers: they stay trainable
    modules: tuple[str, ...]  # ran to their end before the first layer and not after it


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel. UsageError for a compiled one, whose graph is already made."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if {"FullyShardedDataParallel", "FSDPModule"} & {base.__name__ for base in type(model).__mro__}:
        raise UsageError(
            "a model that is sharded by FSDP cannot be frozen while it trains: its shards are made of all parameters",
            hint="freeze before sharding, or train with DistributedDataParallel",
        )
    if "OptimizedModule" in {base.__name__ for base in type(model).__mro__}:  # by name: importing torch._dynamo takes seconds
        raise UsageError(
            "a model compiled by torch.compile cannot be frozen layer by layer: its graph is fixed",
            hint="give the model itself, uncompiled",
        )
    return model


def find_layers(model: nn.Module) -> tuple[str, ...]:
    """Paths of the layers, in order. UsageError when the model has no list of layers."""
    paths = decoder_layers(model)
    if not paths:
        raise UsageError(
            f"{type(model).__name__} has no list of layers to freeze from the front",
            hint="its layers must stand in an nn.ModuleList or nn.Sequential",
        )
    return paths


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dictionaries (a Hugging Face output is one)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def _leaves(tensors: Iterable[Tensor], stop: set[Any]) -> tuple[set[int], set[Any]]:
    """Identities of the parameters that tensors were computed from, and the graph's nodes on the way.

    A node of `stop` is not entered; if it is itself a parameter's, it counts.
    """
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found = {id(tensor) for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad}
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        if node not in stop:
            todo += [following for following, _ in node.next_functions if following is not None]
    return found, seen


class Observer:
    """Watches forward passes of `model` until one has gradients, then has `before` and no hook left."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        self.before: Before | None = None
        self._model = model
        self._inside = tuple(f"{path}." for path in layers)
        self._first = layers[0]
        self._handles: list[Any] = []
        self._reset()
        for path, module in model.named_modules():
            if path and path not in layers and not path.startswith(self._inside):
                self._handles.append(module.register_forward_pre_hook(self._starts(path)))
                self._handles.append(module.register_forward_hook(self._ends(path)))
        first = model.get_submodule(self._first)
        self._handles.append(first.register_forward_pre_hook(self._reaches_layers, with_kwargs=True))
        self._handles.append(model.register_forward_pre_hook(lambda *_: self._reset()))
        self._handles.append(model.register_forward_hook(lambda _module, _args, output: self._finish(output)))

    def remove(self) -> None:
        """Takes its hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _reset(self) -> None:
        self._ended: list[str] = []
        self._after: set[str] = set()
        self._input: list[Tensor] | None = None

    def _starts(self, path: str) -> Any:
        def hook(*_: Any) -> None:
            if self._input is not None:
                self._after.add(path)

        return hook

    def _ends(self, path: str) -> Any:
        def hook(*_: Any) -> None:
            if self._input is None:
                self._ended.append(path)

        return hook

    def _reaches_layers(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._input is None:
            self._input = [*tensors_in(args), *tensors_in(kwargs)]

    def _finish(self, output: Any) -> None:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if self._input is None or not outputs:
            self._reset()
            return
        first, nodes = _leaves([tensor for tensor in self._input if tensor.requires_grad], set())
        later, _ = _leaves(outputs, nodes)
        names = {id(p): name for name, p in self._model.named_parameters()}
        parameters = tuple(name for key, name in names.items() if key in first)
        self.before = Before(
            parameters,
            tuple(name for key, name in names.items() if key in first and key in later),
            tuple(dict.fromkeys(path for path in self._ended if path not in self._after)),
        )
        self._reset()
        self.remove()
