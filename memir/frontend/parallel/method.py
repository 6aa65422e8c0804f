"""What a distributed method is to the oracles: mesh axes, and PyTorch's own calls that change a prepared module."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memir.errors import UsageError
from memir.frontend.loaded import LoadedModel
from memir.frontend.loop import Step
from memir.frontend.optimizers import make_optimizer
from memir.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the device mesh: its name and how many ranks it has."""

    name: str
    degree: int


@dataclass(frozen=True, slots=True)
class Model:
    """What a method is applied to: the loaded model, the module that is trained (adapters injected), and its layers."""

    loaded: LoadedModel
    module: nn.Module
    recipe: Recipe

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        by_name = dict(self.module.named_modules())
        return [by_name.get(path) or by_name[f"base_model.model.{path}"] for path in self.loaded.layers]


RunStep = Callable[[], object]


class Method:
    """Base class; subclasses are frozen dataclasses whose fields are PyTorch's options.

    `order` says which methods are applied first to the module (low numbers): tensor parallelism before FSDP before DDP.
    """

    name: ClassVar[str] = ""
    order: ClassVar[int] = 0

    def axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh, outer first."""
        raise NotImplementedError

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """The module that the loop calls; `mesh` has this method's own axes only."""
        raise NotImplementedError

    def own_step(self, model: Model, mesh: DeviceMesh, batch: Mapping[str, torch.Tensor]) -> RunStep | None:
        """A step that the method runs itself (a pipeline's schedule, DeepSpeed's engine), its optimizer included; None where
        the loop's own step (`memir.frontend.loop.Step`) calls the module."""
        return None

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """What the training script puts around forward, loss and backward."""
        yield


def world_size(methods: Sequence[Method]) -> int:
    """How many ranks the methods' mesh has."""
    ranks = 1
    for method in methods:
        for axis in method.axes():
            ranks *= axis.degree
    return ranks


def make_mesh(methods: Sequence[Method]) -> DeviceMesh:
    """The mesh of all methods' axes; the process group must be there. UsageError for an axis twice.

    What is applied last has the outer axes,
    in whatever order they are given: the ranks of a tensor-parallel group are neighbours.
    """
    axes = [axis for method in sorted(methods, key=lambda m: -m.order) for axis in method.axes()]
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise UsageError(f"a method is given twice: the mesh has the axes {', '.join(names)}")
    return init_device_mesh("cpu", tuple(axis.degree for axis in axes), mesh_dim_names=tuple(names))


def apply_methods(methods: Sequence[Method], model: Model, mesh: DeviceMesh) -> nn.Module:
    """The module with every method applied, each on its own axes of `mesh`."""
    module = model.module
    for method in sorted(methods, key=lambda m: m.order):
        module = method.apply(Model(model.loaded, module, model.recipe), _axes_of(method, mesh))
    return module


def make_step(methods: Sequence[Method], model: Model, mesh: DeviceMesh, batch: Mapping[str, torch.Tensor]) -> RunStep:
    """The methods applied, the optimizer made, and one step of it. UsageError where two methods have a step of their own."""
    module = apply_methods(methods, model, mesh)
    gc.collect()  # loading leaves cycles behind that hold the parameters as they were before they were sharded
    applied = Model(model.loaded, module, model.recipe)
    own = [(method, _axes_of(method, mesh)) for method in methods]
    steps = [step for step in (method.own_step(applied, axes, batch) for method, axes in own) if step is not None]
    if len(steps) > 1:
        raise UsageError(f"two of {', '.join(method.name for method in methods)} run the step themselves")
    if steps:
        return steps[0]
    step = Step(module, model.loaded.call, model.recipe, make_optimizer(module, model.recipe))
    return lambda: step(batch)


def _axes_of(method: Method, mesh: DeviceMesh) -> DeviceMesh:
    return mesh[tuple(axis.name for axis in method.axes())]


@contextmanager
def around_step(methods: Sequence[Method]) -> Iterator[None]:
    """All methods' contexts."""
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(method.around_step())
        yield


DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "": None}
