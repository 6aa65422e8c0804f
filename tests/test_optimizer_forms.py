"""Which form of an optimizer runs: a golden table, and torch.optim itself on a CPU that is said to have foreach kernels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._python_dispatch import TorchDispatchMode

from memir.cuda.optimizers import default_form, forms
from memir.errors import UsageError
from memir.frontend.optimizers import make_optimizer, optimizer_class, resolved_impl
from memir.recipe import Recipe

TABLE = {  # torch.optim class -> its form on CUDA where none is asked for, and all that it has; torch/optim/*.py of 2.13
    "Adadelta": ("foreach", ("foreach", "for-loop")),
    "Adafactor": ("for-loop", ("foreach", "for-loop")),
    "Adagrad": ("foreach", ("foreach", "fused", "for-loop")),
    "Adam": ("foreach", ("foreach", "fused", "for-loop")),
    "AdamW": ("foreach", ("foreach", "fused", "for-loop")),
    "Adamax": ("foreach", ("foreach", "for-loop")),
    "ASGD": ("foreach", ("foreach", "for-loop")),
    "Muon": ("for-loop", ("for-loop",)),
    "NAdam": ("foreach", ("foreach", "for-loop")),
    "RAdam": ("foreach", ("foreach", "for-loop")),
    "RMSprop": ("foreach", ("foreach", "for-loop")),
    "Rprop": ("foreach", ("foreach", "for-loop")),
    "SGD": ("foreach", ("foreach", "fused", "for-loop")),
    "SparseAdam": ("for-loop", ("for-loop",)),
}


def names() -> Iterator[str]:
    """Every optimizer of the installed torch that memir takes."""
    for name, cls in vars(torch.optim).items():
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS"):
            yield name


class Opcodes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def form(self) -> str:
        if any(name.startswith("_fused_") for name in self.seen):
            return "fused"
        return "foreach" if any(name.startswith("_foreach_") for name in self.seen) else "for-loop"


def form_that_runs(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer does on the CPU where the devices with foreach kernels are said to include it, as CUDA is."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", return_value=["cpu"]), Opcodes() as opcodes:
        optimizer.step()
    return opcodes.form


class Wrapped(torch.Tensor):
    """A tensor of another class, as a sharded or quantized one is."""


BY_TENSOR = [  # device, parameter type, class, use_fused -> form; torch/optim/optimizer.py, `_default_to_fused_or_foreach`
    *(
        ("cuda", dtype, nn.Parameter, False, "foreach")
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
    ),
    *(("cpu", dtype, nn.Parameter, False, "for-loop") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(("meta", dtype, nn.Parameter, False, "for-loop") for dtype in (torch.float32, torch.bfloat16)),
    *(("cuda", dtype, nn.Parameter, True, "fused") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ("cuda", torch.complex64, nn.Parameter, True, "foreach"),  # fused kernels take floating-point tensors only
    ("cpu", torch.float32, nn.Parameter, True, "fused"),
    ("cuda", torch.float32, Wrapped, False, "for-loop"),
    ("cuda", torch.float32, Wrapped, True, "for-loop"),
    ("cuda", torch.float32, torch.Tensor, False, "foreach"),
]


@pytest.mark.parametrize(("device", "dtype", "cls", "use_fused", "form"), BY_TENSOR)
def test_the_form_by_device_and_type(device: str, dtype: torch.dtype, cls: type, use_fused: bool, form: str) -> None:
    """PyTorch's own function; there is no CUDA here, so the cpu is put on the list of devices with foreach kernels."""
    plain = torch.ones(2, dtype=dtype, device="meta" if device == "meta" else "cpu")
    tensor = nn.Parameter(plain) if cls is nn.Parameter else plain.as_subclass(cls)
    with_foreach = ["cpu"] if device == "cuda" else ["cuda"]
    with mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", return_value=with_foreach):
        fused, foreach = _default_to_fused_or_foreach([tensor], False, use_fused)
    assert ("fused" if fused else "foreach" if foreach else "for-loop") == form


def test_the_table_has_every_class() -> None:
    assert set(names()) <= set(TABLE)


@pytest.mark.parametrize("name", sorted(set(names()) - {"SparseAdam"}))  # SparseAdam refuses dense gradients
def test_torch_takes_the_form_of_the_table(name: str) -> None:
    cls = optimizer_class(name)
    options = inspect.signature(cls).parameters
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(8, 4))]
    given: dict[str, Any] = {"lr": 0.1} if options["lr"].default is inspect.Parameter.empty else {}
    assert form_that_runs(cls(parameters, **given)) == TABLE[name][0]


@pytest.mark.parametrize("name", sorted(names()))
def test_the_rules_are_the_table(name: str) -> None:
    options = inspect.signature(optimizer_class(name)).parameters
    default, every = TABLE[name]
    assert default_form(name, options, "cuda") == default
    assert default_form(name, options, "cpu") == "for-loop"
    assert forms(options) == every


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad"])
@pytest.mark.parametrize("form", ["foreach", "fused", "for-loop"])
def test_an_asked_form_is_built(name: str, form: str) -> None:
    optimizer = make_optimizer(nn.Linear(4, 4), Recipe(optimizer=name, optimizer_impl=form))
    assert optimizer is not None
    assert form_that_runs(optimizer) == form


def test_a_form_that_a_class_does_not_have() -> None:
    assert resolved_impl(Recipe(optimizer="none")) == "none"
    with pytest.raises(UsageError, match=r"torch\.optim\.RMSprop has no fused form"):
        resolved_impl(Recipe(optimizer="rmsprop", optimizer_impl="fused"))
