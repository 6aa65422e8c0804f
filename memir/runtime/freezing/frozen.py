"""How a frozen module differs from what it was: a class of its own over the module's class, as FSDP2 does it.

Two things must hold whatever trains the model: `model.train()`, which the Hugging Face Trainer calls before each step, leaves
frozen modules in eval; and a frozen layer can be passed over. Hooks cannot do either. The class has the name of the one
it stands over, and everything else of it; `isinstance`, `state_dict` and copies work as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memir.errors import InconclusiveError

if TYPE_CHECKING:
    from memir.runtime.freezing.prefix import FrozenPrefix

_CLASSES: dict[tuple[type, type], type] = {}


@dataclass(eq=False, slots=True)
class Link:
    """A frozen layer's way to its prefix; a copy of the model keeps it, and is none of the prefix's own layers."""

    prefix: FrozenPrefix
    number: int

    def __deepcopy__(self, _memo: dict[int, Any]) -> Link:
        return self


class FrozenModule:
    """Stays in eval."""

    def train(self, _mode: bool = True) -> Any:
        """As nn.Module.train(False)."""
        return super().train(False)  # type: ignore[misc]


class FrozenLayer(FrozenModule):
    """Stays in eval, runs without gradients, and may be passed over."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, unless the prefix has its result."""
        link: Link = self._memir_link  # type: ignore[attr-defined]
        this: object = self
        own = super().forward  # type: ignore[misc]
        if link.prefix.layers[link.number] is not this:  # a copy of the model
            with torch.no_grad():
                return own(*args, **kwargs)
        return link.prefix.run_layer(link.number, own, args, kwargs)


def freeze_module(module: nn.Module) -> None:
    """Puts a module into eval for good."""
    if not isinstance(module, FrozenModule):
        module.__class__ = _over(FrozenModule, type(module))
    module.eval()


def check_layer(layer: nn.Module, number: int) -> None:
    """InconclusiveError where something has replaced the forward of this very object (accelerate does, for a device map)."""
    if "forward" in vars(layer):
        raise InconclusiveError(
            f"layer {number} has a forward that was set on the object, over that of its class {type(layer).__name__}",
            hint="load the model without a device_map",
        )


def freeze_layer(layer: nn.Module, prefix: FrozenPrefix, number: int) -> None:
    """Makes `layer` the prefix's frozen layer `number`."""
    if not isinstance(layer, FrozenLayer):
        layer.__class__ = _over(FrozenLayer, type(layer))
    layer._memir_link = Link(prefix, number)  # type: ignore[assignment]
    layer.eval()


def thaw_class(module: nn.Module) -> None:
    """Gives a module its own class back."""
    if isinstance(module, FrozenModule):
        bases = [base for base in type(module).__mro__ if not issubclass(base, FrozenModule)]
        module.__class__ = bases[0]  # type: ignore[assignment]
        vars(module).pop("_memir_link", None)


def _over(mixin: type, own: type) -> type:
    if (mixin, own) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        _CLASSES[mixin, own] = type(own.__name__, (mixin, own), names)
    return _CLASSES[mixin, own]
