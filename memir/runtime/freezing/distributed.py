"""What freezing needs to know of several processes: the rank, one decision for all, a reducer without the frozen parameters."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memir.errors import UsageError


def rank() -> int:
    """This process's number, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules around `model` (a Trainer keeps its own to itself)."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel) and found.module is model]


def rebuild_reducers(model: nn.Module) -> int:
    """Has every DistributedDataParallel around `model` reduce only the gradients that there still are; says how many.

    DDP collects the parameters that require a gradient when it is made, and waits for all of them in each backward
    (torch/nn/parallel/distributed.py, `_build_params_for_reducer`). Its own way to make the reducer anew is that of
    pickling, `__setstate__`; in place, so that who holds the wrapper keeps it. The buckets' memory falls with it.
    UsageError where DDP was made on another than the default process group, which its pickling does not keep.
    """
    found = wrappers_of(model)
    for wrapper in found:
        if wrapper.process_group is not dist.group.WORLD:
            raise UsageError(
                "layers cannot be frozen under a DistributedDataParallel of its own process group",
                hint="wrap the model without process_group=, or freeze before wrapping",
            )
        state = wrapper.__getstate__()  # type: ignore[no-untyped-call]
        wrapper.__setstate__(state)  # type: ignore[no-untyped-call]
    return len(found)


def agreed(values: Sequence[float], device: torch.device) -> list[float]:
    """Rank 0's values, on every rank: no two processes may freeze different layers."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(values)
    shared = torch.tensor(values, dtype=torch.float64, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(shared, src=0)
    return [float(value) for value in shared.tolist()]
