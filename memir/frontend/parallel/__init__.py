"""PyTorch's own distributed methods applied to the user's model, for the oracles: what passes are checked against.

    fsdp               torch.distributed.fsdp.fully_shard (FSDP2)
    fsdp1              torch.distributed.fsdp.FullyShardedDataParallel
    data-parallel      torch.nn.parallel.DistributedDataParallel
    context-parallel   torch.distributed.tensor.experimental's ring attention, or DeepSpeed's DistributedAttention
    expert-parallel    transformers.distributed.expert_parallel
    tensor-parallel    torch.distributed.tensor.parallel.parallelize_module
    zero               deepspeed.initialize

Methods are picklable dataclasses; their text is that of the passes, `fsdp{degree=2},tensor-parallel{degree=2}`, in any order.
"""

from __future__ import annotations

from memir.errors import UsageError
from memir.frontend.parallel.context import ContextParallel
from memir.frontend.parallel.ddp import DataParallel
from memir.frontend.parallel.expert import ExpertParallel
from memir.frontend.parallel.fsdp import Fsdp
from memir.frontend.parallel.fsdp1 import Fsdp1
from memir.frontend.parallel.method import Method
from memir.frontend.parallel.tensor import TensorParallel
from memir.frontend.parallel.zero import Zero
from memir.options import parse_list
from memir.registry import nearest

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (ContextParallel, DataParallel, ExpertParallel, Fsdp, Fsdp1, TensorParallel, Zero)
}


def parse_methods(text: str) -> tuple[Method, ...]:
    """The methods that `name{key=value},name` spells; ParseError or UsageError otherwise."""
    return parse_list(text, _named)


def _named(name: str) -> type[Method]:
    if name not in METHODS:
        raise UsageError(f"no method {name!r} can be run for real", hint=nearest(name, list(METHODS)))
    return METHODS[name]
