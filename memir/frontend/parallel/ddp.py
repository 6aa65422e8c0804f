"""Data parallelism: `DistributedDataParallel` with its buckets and communication hooks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from memir.frontend.parallel.method import Axis, Method, Model


def _compress_bf16(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's bf16_compress_hook under a name that DistributedDataParallel does not refuse without NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


@dataclass(frozen=True, slots=True)
class DataParallel(Method):
    """Every rank has the whole model; gradients are averaged bucket by bucket."""

    name: ClassVar[str] = "data-parallel"
    order: ClassVar[int] = 3

    degree: int = 1
    bucket_cap_mb: float | None = None  # MiB; None is PyTorch's 25, with a first bucket of 1
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused: bool = False
    hook: Literal["none", "allreduce", "fp16", "bf16"] = "none"

    def axes(self) -> tuple[Axis, ...]:
        """One axis, `data`."""
        return (Axis("data", self.degree),)

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """The module wrapped."""
        wrapped = DistributedDataParallel(
            model.module,
            process_group=mesh.get_group(),
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused,
        )
        hooks = {
            "allreduce": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": _compress_bf16,
        }
        if self.hook != "none":
            wrapped.register_comm_hook(mesh.get_group(), hooks[self.hook])
        return wrapped
