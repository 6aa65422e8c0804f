"""DeepSpeed imported for CPU ranks. memir does not need it; the oracles that run its code do (`pip install deepspeed`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from memir.errors import UsageError


def import_deepspeed(method: str) -> Any:
    """The package, on the CPU and with the process group that is there. UsageError where it is not installed."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "LOCAL_SIZE": str(dist.get_world_size())}
    try:
        import deepspeed
        import deepspeed.comm
        import deepspeed.comm.torch
    except ImportError as error:
        raise UsageError(f"{method} runs DeepSpeed's own code, which is not installed", hint="pip install deepspeed") from error
    backend: Any = sys.modules["deepspeed.comm.torch"]  # deepspeed.comm has another thing by this name
    backend.build_shm_op = lambda: None  # an all-reduce in shared memory for CPUs, compiled when first used
    return deepspeed


def distributed_attention(attention: Callable[..., Any], group: dist.ProcessGroup) -> Any:
    """`deepspeed.sequence.layer.DistributedAttention` of attention on [B, S, H, K]. UsageError where DeepSpeed is missing."""
    deepspeed = import_deepspeed("context-parallel{method=ulysses}")
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    from deepspeed.sequence.layer import DistributedAttention

    return DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)
