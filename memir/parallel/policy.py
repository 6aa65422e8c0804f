"""What fully_shard and its policies are told, as the passes of sharded data parallelism hand it on."""

from __future__ import annotations

from dataclasses import dataclass

from memir.ir.core import Value
from memir.ir.size import ONE, Size

FLOATS = ("bf16", "f16", "f32", "f64")


@dataclass(frozen=True, slots=True)
class Policy:
    """How units are sharded: what fully_shard, MixedPrecisionPolicy and the prefetch setters are given."""

    degree: Size  # ranks that a parameter is chunked over
    replicas: Size = ONE  # HSDP: as many such groups
    reshard: bool = True  # layers, after forward
    reshard_root: bool = False
    keep_last: bool = False  # the last layer is not resharded after forward
    post_forward: int = 0  # resharded after forward to so many ranks; 0: to all
    shard_dtype: str = ""  # of floating-point shards; "" as traced
    is_mixed: bool = False  # MixedPrecisionPolicy.param_dtype is another type than the shards'
    reduce_dtype: str = ""  # "" that of the gradients
    offload: bool = False  # CPUOffloadPolicy
    sync_last: bool = False  # set_requires_gradient_sync(False) for all micro-batches but the last
    forward_prefetch: int = 0  # layers gathered ahead by hand (set_modules_to_forward_prefetch)
    backward_prefetch: int = 0  # 0: one, implicitly

    def shard_dtype_of(self, value: Value) -> str:
        """The type of a parameter's shard."""
        return self.shard_dtype if self.shard_dtype and value.dtype in FLOATS else value.dtype
