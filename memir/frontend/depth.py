"""A model cut down to a few of its layers: which ones repeat, and the same model without the others.

Layers are alike when their modules are: classes, parameters, buffers and plain attributes, apart from their own number. What
runs through them is compared later, in the traced step (`memir.frontend.fold`); here it is only decided what to trace.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from memir.frontend.layout import Layout
from memir.frontend.loaded import LoadedModel

MAX_PERIOD = 12  # layers in a unit; published hybrids have up to 8
DEPTH_NAME = re.compile(r"^_?(n|num|number_of|nr)?_?(hidden_|decoder_)?(layers?|blocks?|depth|L)$", re.IGNORECASE)


def find_layout(loaded: LoadedModel, least: int) -> Layout | None:
    """How the layers repeat, if leaving out all but `least` units makes the model smaller; None otherwise."""
    found = _list_of(loaded)
    if found is None:
        return None
    path, layers = found
    kinds = _kinds(layers)
    best: Layout | None = None
    for period in range(1, min(MAX_PERIOD, len(kinds)) + 1):
        layout = _repeating(path, kinds, period)
        if layout.units > least and (best is None or layout.at(least).depth < best.at(least).depth):
            best = layout
    return best


def cut(loaded: LoadedModel, layout: Layout) -> LoadedModel:
    """The model with `layout.units` units only, changed in place. The config that it carries is a changed copy.

    Lists with one entry a layer (layer types, a second list of modules) and numbers of layers are cut too.
    """
    found = _list_of(loaded)
    assert found is not None
    _, layers = found
    total = len(layers)
    kept = [*range(layout.depth - layout.tail), *range(total - layout.tail, total)]
    numbered = [_own_numbers(layer, number) for number, layer in enumerate(layers)]
    module = loaded.module
    configs: dict[int, Any] = {}
    for submodule in module.modules():
        _cut_attributes(submodule, kept, total, configs)
    for submodule in list(module.modules()):
        if submodule is layers or (isinstance(submodule, nn.ModuleList | nn.ParameterList) and len(submodule) == total):
            _keep(submodule, kept)
    for number, old in enumerate(kept):
        for owner, name, value in numbered[old]:
            owner.__dict__[name] = value - old + number
    assert len(layers) == len(kept)
    return replace(loaded, module=module, layers=tuple(f"{layout.path}.{k}" for k in range(len(kept))))


def _list_of(loaded: LoadedModel) -> tuple[str, Any] | None:
    """The list of decoder layers and its path."""
    paths = {path.rpartition(".")[0] for path in loaded.layers}
    if len(paths) != 1:
        return None
    path = paths.pop()
    layers = loaded.module.get_submodule(path)
    numbered = [f"{path}.{k}" for k in range(len(loaded.layers))]
    if not isinstance(layers, nn.ModuleList | nn.Sequential) or list(loaded.layers) != numbered or len(layers) != len(numbered):
        return None
    return path, layers


def _kinds(layers: Any) -> list[int]:
    """A number for each layer; equal for layers that are alike."""
    looks: dict[object, int] = {}
    return [looks.setdefault(_look(layer, number), len(looks)) for number, layer in enumerate(layers)]


def _look(layer: nn.Module, number: int) -> object:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module._parameters.items() if p is not None),
            tuple((n, tuple(b.shape), b.dtype) for n, b in module._buffers.items() if b is not None),
            tuple((n, plain) for n, v in sorted(vars(module).items()) if (plain := _plain(n, v, number)) is not None),
        )
        for name, module in layer.named_modules()
    )


def _plain(name: str, value: Any, number: int) -> object:
    """What a plain attribute says about a layer; None for what says nothing (its own number, a module, a cache)."""
    if name.startswith("__") or name == "training":
        return None
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return None if _is_number(name, value, number) else value
    if isinstance(value, float):
        return value > 0  # how likely a layer is dropped, how much it is scaled: it matters only whether it is
    if isinstance(value, str | torch.dtype):
        return str(value)
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, tuple | list) and all(isinstance(v, int | str) for v in value):
        return tuple(value)
    return None


def _is_number(name: str, value: int, number: int) -> bool:
    """Whether an integer attribute is the layer's own number, from 0 or 1."""
    return bool(re.search(r"idx|index|layer|block|depth|number|^id$|_id$|^i$", name)) and value in (number, number + 1)


def _own_numbers(layer: nn.Module, number: int) -> list[tuple[nn.Module, str, int]]:
    return [
        (module, name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if type(value) is int and _is_number(name, value, number)
    ]


def _repeating(path: str, kinds: list[int], period: int) -> Layout:
    """The longest stretch that repeats after `period` layers."""
    best = (0, 0)
    start = 0
    for k in range(len(kinds) + 1):
        if k + period >= len(kinds) or kinds[k] != kinds[k + period]:
            best = max(best, (k + period - start, -start))
            start = k + 1
    length, lead = best[0], -best[1]
    units = length // period
    return Layout(path, lead, period, units, len(kinds) - lead - units * period)


def _keep(holder: Any, kept: list[int]) -> None:
    """Leaves these entries of a list of modules or parameters, renumbered."""
    registry = holder._parameters if isinstance(holder, nn.ParameterList) else holder._modules
    entries = list(registry.values())
    registry.clear()
    registry.update({str(number): entries[old] for number, old in enumerate(kept)})
    if isinstance(holder, nn.ParameterList):
        holder._size = len(kept)


def _cut_attributes(owner: Any, kept: list[int], total: int, configs: dict[int, Any]) -> None:
    """Lists and numbers of layers among the attributes of a module, or of a copied config."""
    for name, value in list(vars(owner).items()):
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        changed = _changed(name, value, kept, total, configs)
        if changed is not value:
            owner.__dict__[name] = changed


def _changed(name: str, value: Any, kept: list[int], total: int, configs: dict[int, Any]) -> Any:
    if type(value) is int and value == total and DEPTH_NAME.match(name):
        return len(kept)
    if type(value) in (list, tuple) and len(value) == total and not isinstance(value, nn.Module):
        return type(value)(value[k] for k in kept)
    if _is_config(value):
        if id(value) not in configs:
            fresh = copy.copy(value)
            configs[id(value)] = fresh
            configs[id(fresh)] = fresh
            if fresh is not value:
                _cut_attributes(fresh, kept, total, configs)
        return configs[id(value)]
    return value


def _is_config(value: Any) -> bool:
    """An object with plain attributes that is no module, tensor, function or class: a config."""
    kind = type(value)
    known = (nn.Module, torch.Tensor, type, FunctionType, torch.Generator)
    return (hasattr(value, "__dict__") and not isinstance(value, known) and "onfig" in kind.__name__ + kind.__module__) or (
        hasattr(kind, "__dataclass_fields__") and hasattr(value, "__dict__")
    )
