"""FSDP2: `fully_shard` on every decoder layer and on the root, as torchtitan and Hugging Face's accelerate apply it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from memir.errors import UsageError
from memir.frontend.parallel.method import DTYPES, Axis, Method, Model


@dataclass(frozen=True, slots=True)
class Fsdp(Method):
    """Parameters, gradients and states sharded over `degree` ranks; with `replicate` > 1 (HSDP) over each of so many groups."""

    name: ClassVar[str] = "fsdp"
    order: ClassVar[int] = 2

    degree: int = 1
    replicate: int = 1  # HSDP: the outer axis, over which gradients are reduced once more
    reshard: str = "default"  # reshard_after_forward: "true", "false", a number of ranks; by default the root keeps its own
    param_dtype: str = ""  # of MixedPrecisionPolicy; "" is None
    reduce_dtype: str = ""
    output_dtype: str = ""
    cast_inputs: bool = True  # cast_forward_inputs
    offload: bool = False  # CPUOffloadPolicy
    forward_prefetch: int = 0  # set_modules_to_forward_prefetch: so many following layers
    backward_prefetch: int = 0  # set_modules_to_backward_prefetch; 0 leaves PyTorch's implicit one
    wrap_embeddings: bool = False  # embedding, and norm with head, are units of their own, as torchtitan has them

    def axes(self) -> tuple[Axis, ...]:
        """`replicate` (with HSDP) and `shard`."""
        shard = Axis("shard", self.degree)
        return (Axis("replicate", self.replicate), shard) if self.replicate > 1 else (shard,)

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """`fully_shard` on each layer, then on the root; the root's parameters stay unsharded after forward by default."""
        policy = MixedPrecisionPolicy(
            DTYPES[self.param_dtype], DTYPES[self.reduce_dtype], DTYPES[self.output_dtype], self.cast_inputs
        )
        offload = CPUOffloadPolicy(pin_memory=False) if self.offload else OffloadPolicy()
        units: list[nn.Module | list[nn.Module]] = list(model.layers)
        if self.wrap_embeddings:
            units += _ends(model)
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=self._reshard(), mp_policy=policy, offload_policy=offload)
        fully_shard(model.module, mesh=mesh, reshard_after_forward=self._reshard(), mp_policy=policy, offload_policy=offload)
        layers = [cast("FSDPModule", layer) for layer in model.layers]
        for at, layer in enumerate(layers):
            if self.forward_prefetch:
                layer.set_modules_to_forward_prefetch(list(islice(layers, at + 1, at + 1 + self.forward_prefetch)))
            if self.backward_prefetch:
                layer.set_modules_to_backward_prefetch(layers[max(0, at - self.backward_prefetch) : at][::-1])
        return model.module

    def _reshard(self) -> bool | int | None:
        words: dict[str, bool | None] = {"true": True, "false": False, "default": None}
        if self.reshard in words:
            return words[self.reshard]
        if self.reshard.isdigit():
            return int(self.reshard)
        raise UsageError(f"fsdp: reshard is true, false, default or a number of ranks, not {self.reshard!r}")


def _ends(model: Model) -> list[nn.Module | list[nn.Module]]:
    """Each embedding, and what follows the layers (norm and head) as one unit (torchtitan, models/llama3/parallelize.py)."""
    inside = {id(m) for layer in model.layers for m in layer.modules()}
    outside = [m for m in model.module.modules() if id(m) not in inside and not list(m.children()) and list(m.parameters())]
    embeddings: list[nn.Module | list[nn.Module]] = [m for m in outside if isinstance(m, nn.Embedding)]
    rest = [m for m in outside if not isinstance(m, nn.Embedding)]
    return [*embeddings, rest] if rest else embeddings
