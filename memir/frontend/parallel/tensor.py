"""Tensor parallelism: `parallelize_module` with Megatron's plan (column, then row), as torchtitan writes it for Llama."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from memir.errors import UsageError
from memir.frontend.parallel.method import Axis, Method, Model

_COLUMN = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "fc1",
        "wq",
        "wk",
        "wv",
        "w1",
        "w3",
        "gate",
        "up",
        "query_key_value",
        "dense_h_to_4h",
    }
)
_ROW = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "wo", "w2", "down", "dense", "dense_4h_to_h"})
_HEADS = ("n_heads", "n_kv_heads", "num_heads", "num_kv_heads", "num_key_value_heads", "num_attention_heads", "n_head")


@dataclass(frozen=True, slots=True)
class TensorParallel(Method):
    """Attention and MLP split over `degree` ranks, embedding and head over the vocabulary."""

    name: ClassVar[str] = "tensor-parallel"
    order: ClassVar[int] = 0

    degree: int = 1
    sequence: bool = False  # between the split parts each rank has its part of the sequence
    loss: bool = False  # the logits stay split over the vocabulary, and so does the cross entropy
    vocabulary: bool = (
        True  # False: embedding and head are whole on every rank, as Hugging Face's own plans leave the embedding
    )

    def axes(self) -> tuple[Axis, ...]:
        """One axis, `tensor`."""
        return (Axis("tensor", self.degree),)

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """The module with its parameters as DTensors on `mesh`. UsageError: not such a model, heads that do not divide."""
        if self.loss and not self.vocabulary:
            raise UsageError("tensor-parallel: loss needs the head split over the vocabulary")
        if model.recipe.clip and not self.sequence:
            raise UsageError(
                "tensor-parallel: clip_grad_norm_ refuses the norms' plain gradients beside DTensors", hint="add  sequence"
            )
        plan: dict[str, ParallelStyle] = {}
        for path, layer in zip(model.loaded.layers, model.layers, strict=True):
            plan |= {f"{path}.{name}": style for name, style in self._layer(layer, model).items()}
        plan |= self._ends(model)
        parallelize_module(model.module, mesh, plan)
        return model.module

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """PyTorch's `loss_parallel` with `loss`."""
        if not self.loss:
            yield
            return
        with loss_parallel():
            yield

    def _layer(self, layer: nn.Module, model: Model) -> dict[str, ParallelStyle]:
        plan: dict[str, ParallelStyle] = {}
        for path, module in layer.named_modules():
            parent_path, _, name = path.rpartition(".")
            if not isinstance(module, nn.Linear):
                if self.sequence and "norm" in name.lower() and not any(True for _ in module.children()):
                    plan[path] = SequenceParallel()
            elif name in _COLUMN:
                parent = layer.get_submodule(parent_path)
                plan[path] = ColwiseParallel(input_layouts=Shard(1) if self.sequence and not parent_path else None)
                self._split_heads(parent, path)
                if self.sequence and parent_path:
                    plan[parent_path] = _gathered_input(parent, model)
            elif name in _ROW:
                plan[path] = (
                    RowwiseParallel(output_layouts=Shard(1), use_local_output=False) if self.sequence else RowwiseParallel()
                )
        if not any(isinstance(style, ColwiseParallel) for style in plan.values()):
            raise UsageError(
                f"tensor-parallel: no linear layer of {type(layer).__name__} has a name that PyTorch's plan is known for",
                where=model.loaded.source,
                hint=f"known: {', '.join(sorted(_COLUMN | _ROW))}",
            )
        return plan

    def _split_heads(self, parent: nn.Module, path: str) -> None:
        """Attention code that names its number of heads is told the local one, once, as users of parallelize_module do."""
        if getattr(parent, "_memir_split", False):
            return
        for name in _HEADS:
            heads = vars(parent).get(name)
            if isinstance(heads, int):
                if heads % self.degree:
                    raise UsageError(f"tensor-parallel: {name}={heads} is not divisible by degree {self.degree}", where=path)
                setattr(parent, name, heads // self.degree)
        parent._memir_split = True  # type: ignore[assignment]

    def _ends(self, model: Model) -> dict[str, ParallelStyle]:
        inside = {id(m) for layer in model.layers for m in layer.modules()}
        plan: dict[str, ParallelStyle] = {}
        embedding, head, norm = "", "", ""
        for path, module in model.module.named_modules():
            if id(module) in inside:
                continue
            if isinstance(module, nn.Embedding):
                embedding = embedding or path
            elif isinstance(module, nn.Linear):
                head = path
            elif "norm" in path.rpartition(".")[2].lower():
                norm = path
        weights = [model.module.get_submodule(path).weight for path in (embedding, head)]
        if weights[0] is weights[1]:
            raise UsageError("tensor-parallel: embedding and head are one tied parameter, which PyTorch's plan cannot split")
        if self.vocabulary:
            after: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if self.sequence else {}
            plan[embedding] = RowwiseParallel(input_layouts=Replicate(), **after)
            out: dict[str, Any] = (
                {"output_layouts": Shard(-1), "use_local_output": False} if self.loss else {"output_layouts": Replicate()}
            )
            plan[head] = ColwiseParallel(input_layouts=Shard(1) if self.sequence else None, **out)
        elif self.sequence:
            raise UsageError("tensor-parallel: sequence without vocabulary is not one of PyTorch's plans")
        if self.sequence:
            plan[norm] = SequenceParallel()
        return plan


def _gathered_input(parent: nn.Module, model: Model) -> ParallelStyle:
    """The input of attention or MLP gathered once for all of its projections; the other arguments stay."""
    parameters = list(inspect.signature(parent.forward).parameters.values())
    if model.loaded.is_hf and parameters[0].name == "hidden_states" and "Attention" in type(parent).__name__:
        return PrepareModuleInput(  # transformers' layers name the argument
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
    rest = [None for p in parameters[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return PrepareModuleInput(input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest))
