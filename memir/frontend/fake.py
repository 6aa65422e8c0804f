"""A model without weights: fake cpu tensors of the right shapes, and a batch whose shape has symbols.

Technique: torch._subclasses.fake_tensor. The module is made on the meta device outside the fake mode and moved into it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from memir.errors import MemirError


@dataclass(frozen=True, slots=True)
class Extent:
    """One dimension of the batch: its name and value; static ones stay a number."""

    name: str
    value: int
    symbolic: bool


@dataclass(slots=True)
class Fake:
    """The fake mode with its shape environment and the names of its symbols."""

    mode: FakeTensorMode
    shape_env: ShapeEnv
    names: dict[Any, str]  # sympy symbol -> "B" or "S"


def make_mode(*, cached: bool = True) -> Fake:
    """A fake tensor mode with a fresh shape environment.

    With `cached` it remembers what operators returned; with symbols that costs more than the few repetitions save.
    """
    shape_env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    mode.cache_enabled = mode.cache_enabled and cached
    return Fake(mode, shape_env, {})


def move_to_fake(module: nn.Module, fake: Fake) -> None:
    """Replaces the meta tensors of `module` by fake cpu ones in place: parameters, buffers, tensor attributes.

    What was one tensor under several names (a tied head, an attribute that is a buffer) stays one; `to_empty` alone splits it.
    """
    registered = [
        (registry, name, tensor)
        for submodule in module.modules()
        for registry in (submodule._parameters, submodule._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]
    before = sum(p.numel() for p in module.parameters())
    moved: dict[int, Any] = {}
    with fake.mode:
        module.to_empty(device="cpu")
        for registry, name, tensor in registered:
            registry[name] = moved.setdefault(id(tensor), registry[name])
        for submodule in module.modules():
            for name, value in list(vars(submodule).items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    after_move = _moved(value, moved)
                    if after_move is not value:
                        submodule.__dict__[name] = after_move
    after = sum(p.numel() for p in module.parameters())
    if before != after:
        raise MemirError(f"the fake model has {after:,} parameters, the model has {before:,}")


def _moved(value: Any, moved: dict[int, Any]) -> Any:
    """Plain tensor attributes, also in lists, tuples and dictionaries, as fake cpu tensors (call inside the fake mode)."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" and (id(value) in moved or not isinstance(value, nn.Parameter)):
            if id(value) not in moved:
                moved[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
            return moved[id(value)]
        return value
    if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)(_moved(v, moved) for v in value)
    if type(value) is dict and any(isinstance(v, torch.Tensor) for v in value.values()):
        return {k: _moved(v, moved) for k, v in value.items()}
    return value


def tensor_attributes(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors a module keeps without registering them, with a name: (path.attribute, tensor)."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
            tensors = [v for v in items if isinstance(v, torch.Tensor)]
            found += [(f"{path}.{name}" + (f".{i}" if i else ""), t) for i, t in enumerate(tensors)]
    return found


def fake_batch(names: tuple[str, ...], batch: Extent, seq: Extent, fake: Fake) -> dict[str, torch.Tensor]:
    """The int64 tensors of shape [B, S] that the loop passes, each its own storage; registers the symbols' names."""
    dims = [DimDynamic.DYNAMIC if extent.symbolic else DimDynamic.STATIC for extent in (batch, seq)]
    plain = torch.zeros((batch.value, seq.value), dtype=torch.long)  # outside the mode: inside it would be static
    first = fake.mode.from_tensor(plain, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))
    for size, extent in zip(first.shape, (batch, seq), strict=True):
        if isinstance(size, torch.SymInt):
            fake.names[size.node.expr] = extent.name
    with fake.mode:
        tensors = [torch.empty(tuple(first.shape), dtype=torch.long, device="cpu") for _ in names]
    return dict(zip(names, tensors, strict=True))
