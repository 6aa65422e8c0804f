"""Build a module on the meta device, whatever its constructor does, and give it the recipe's dtype."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memir.frontend.device import build_device

Convert = Callable[[torch.Tensor], torch.Tensor]
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class CudaMeans(TorchFunctionMode):
    """Within, a named CUDA device means `device`: `.cuda()` and `device="cuda"` work on a machine without a GPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        return func(*(self._mapped(a) for a in args), **{n: self._mapped(v) for n, v in (kwargs or {}).items()})

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return self.device
        return self.device if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value


def build_on_meta(make: Callable[[], Any]) -> Any:
    """The result of `make()`, built on the meta device.

    Constructors that need real numbers (`.item()` on a linspace, a numpy table) fail there; they are run again with only the
    parameters on meta, each moved there as it is registered, and everything else computed for real. Raises what that raises.
    On a real device (`memir.frontend.device`) it is simply built there.
    """
    if build_device() != "meta":
        with torch.device(build_device()), CudaMeans(build_device()):
            return make()
    try:
        with torch.device("meta"), CudaMeans("meta"):
            return make()
    except Exception:  # a boundary: the user's constructor; the second way raises what is really wrong
        with CudaMeans("cpu"), _parameters_on_meta():
            return make()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and param.device.type != "meta":
            self._parameters[name] = _as_parameter(param, param.detach().to("meta"))

    with mock.patch.object(nn.Module, "register_parameter", registered):
        yield


def _as_parameter(old: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def replace_tensors(module: nn.Module, convert: Convert) -> None:
    """Replace every tensor that a module holds: parameters, buffers, plain attributes, also in lists, tuples and dictionaries.

    One tensor held in several places (tied weights) is converted once and stays one.
    """
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in done:
            new = convert(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                new = _as_parameter(tensor, new)
            done[id(tensor)] = (tensor, new)  # the old one is kept, so that its id stays its own
        return done[id(tensor)][1]

    def anywhere(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return converted(value)
        if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return type(value)(anywhere(v) for v in value)
        if type(value) is dict and any(isinstance(v, torch.Tensor) for v in value.values()):
            return {k: anywhere(v) for k, v in value.items()}
        return value

    for submodule in module.modules():
        for registry in (submodule._parameters, submodule._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None:
                    cast("dict[str, torch.Tensor]", registry)[name] = converted(tensor)
        for name, value in list(vars(submodule).items()):
            if name not in _REGISTRIES and (new := anywhere(value)) is not value:
                submodule.__dict__[name] = new


def move_to_meta(module: nn.Module) -> None:
    """Move whatever is not on the meta device there; ties are kept, which `module.to("meta")` does not do.

    On a real device nothing is moved, but what the constructor left elsewhere.
    """
    if build_device() != "meta":
        module.to(build_device())
        return
    replace_tensors(module, lambda tensor: tensor if tensor.device.type == "meta" else tensor.to("meta"))


def to_dtype(module: nn.Module, dtype: torch.dtype, assumptions: list[str]) -> None:
    """`module.to(dtype)`: floating-point parameters and buffers. Complex buffers, which that would make real, are kept.

    A module whose parameters have the dtype already stays as it is: its float32 buffers are meant (rotary frequencies).
    """
    if all(p.dtype == dtype for p in module.parameters() if p.is_floating_point()):
        return
    complex_ones = [
        (submodule, name, buffer)
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None and buffer.is_complex()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.to(dtype)
    for submodule, name, buffer in complex_ones:
        submodule._buffers[name] = buffer
    if complex_ones:
        names = sorted({name for _, name, _ in complex_ones})
        assumptions.append(f"complex buffers keep their dtype: {', '.join(names)}")


def meta_copy(module: nn.Module) -> nn.Module | None:
    """A copy whose tensors are on the meta device; the module itself stays as it is, and no data is copied.

    None when a function that the module keeps holds one of its submodules in a closure: a copy would still call the original.
    """
    submodules = {id(m) for m in module.modules()}
    for submodule in module.modules():
        for value in vars(submodule).values():
            cells = getattr(value, "__closure__", None) or ()
            if any(id(held) in submodules for cell in cells for held in _contents(cell)):
                return None
    memo: dict[int, Any] = {}
    for submodule in module.modules():
        tensors = [*submodule._parameters.values(), *submodule._buffers.values(), *_tensors_in(list(vars(submodule).values()))]
        for tensor in tensors:
            if tensor is not None and id(tensor) not in memo:
                data = tensor.detach().to("meta")
                memo[id(tensor)] = _as_parameter(tensor, data) if isinstance(tensor, nn.Parameter) else data
    return copy.deepcopy(module, memo)


def _contents(cell: Any) -> Iterator[Any]:
    try:
        held = cell.cell_contents
    except ValueError:  # an empty cell
        return
    yield held
    if isinstance(held, (list, tuple)):
        yield from held


def _tensors_in(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors_in(list(value))
        elif type(value) is dict:
            yield from _tensors_in(list(value.values()))
