"""FSDP1: `FullyShardedDataParallel` with flat parameters, as Hugging Face's accelerate wraps it by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from memir.frontend.parallel.method import DTYPES, Axis, Method, Model

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
_STRATEGY = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
    "hybrid-grad-op": ShardingStrategy._HYBRID_SHARD_ZERO2,
}


@dataclass(frozen=True, slots=True)
class Fsdp1(Method):
    """Each layer's parameters in one flat parameter, sharded over `degree` ranks (with "hybrid" in each of `replicate`)."""

    name: ClassVar[str] = "fsdp1"
    order: ClassVar[int] = 2

    degree: int = 1
    replicate: int = 1  # for the two hybrid strategies
    strategy: Literal["full", "grad-op", "none", "hybrid", "hybrid-grad-op"] = "full"
    param_dtype: str = ""  # of MixedPrecision; "" is None
    reduce_dtype: str = ""
    buffer_dtype: str = ""
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = True

    def axes(self) -> tuple[Axis, ...]:
        """`replicate` (hybrid strategies) and `shard`."""
        shard = Axis("shard", self.degree)
        return (Axis("replicate", self.replicate), shard) if self.strategy.startswith("hybrid") else (shard,)

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """The wrapped root; layers are wrapped by the class of the layer."""
        param, reduce, buffer = (DTYPES[text] for text in (self.param_dtype, self.reduce_dtype, self.buffer_dtype))
        mixed = MixedPrecision(param, reduce, buffer) if param or reduce or buffer else None
        return FullyShardedDataParallel(
            model.module,
            sharding_strategy=_STRATEGY[self.strategy],
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in model.layers}),
            backward_prefetch=_PREFETCH[self.backward_prefetch],
            mixed_precision=mixed,
            forward_prefetch=self.forward_prefetch,
            limit_all_gathers=self.limit_all_gathers,
            use_orig_params=self.use_orig_params,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
        )
