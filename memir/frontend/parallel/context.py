"""Context parallelism: PyTorch's ring attention, with the CPU's kernel where CUDA has its own, or DeepSpeed-Ulysses.

`torch.distributed.tensor.experimental.context_parallel` dispatches CUDA's kernels only; the templates that it runs
(`_templated_ring_attention` and its backward) take any kernel. Ulysses: `deepspeed.sequence.layer.DistributedAttention` around
PyTorch's own attention; DeepSpeed has to be installed. A rank's batch is its part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention as context
from torch.nn import functional

from memir.errors import UsageError
from memir.frontend.parallel.deepspeed import distributed_attention
from memir.frontend.parallel.method import Axis, Method, Model

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SEQUENCE = 2  # the dimension of [B, H, S, K]
_groups: list[Any] = []  # of the method that is applied
_divided: list[Any] = []  # DeepSpeed's module, with ulysses


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        out, logsumexp = context._templated_ring_attention(
            _groups[0], _SEQUENCE, _FORWARD, query=query, key=key, value=value, is_causal=True, dropout_p=0.0, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        grads = context._templated_ring_attention_backward(
            _groups[0],
            _SEQUENCE,
            _BACKWARD,
            grad_out=grad_out,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
        )
        return (*grads[:3], None)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs.get("attn_mask") is not None or kwargs.get("dropout_p") or kwargs.get("enable_gqa"):
        raise UsageError("context-parallel: PyTorch's ring attention has no mask, no dropout and no shared heads")
    out: Tensor = _Ring.apply(query, key, value, kwargs.get("scale"))  # type: ignore[no-untyped-call]
    return out


_plain = functional.scaled_dot_product_attention


def _local_attention(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """PyTorch's attention on [B, S, H, K]."""
    return _plain(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **kwargs).transpose(1, 2)


def _ulysses(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs.get("attn_mask") is not None:
        raise UsageError("context-parallel: a mask is of all tokens, and a rank has that of its own")
    out: Tensor = _divided[0](query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), 0, **kwargs)
    return out.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class ContextParallel(Method):
    """Every rank has a part of each sequence; keys and values go around."""

    name: ClassVar[str] = "context-parallel"
    order: ClassVar[int] = 1

    degree: int = 1
    method: Literal["ring", "ulysses"] = "ring"
    rotate: Literal["all-gather", "all-to-all"] = "all-gather"
    balance: bool = True  # a rank has a part of the sequence's head and one of its tail

    def axes(self) -> tuple[Axis, ...]:
        """One axis, `context`."""
        return (Axis("context", self.degree),)

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """The module as it is: attention is another function during the step."""
        _groups[:] = [mesh.get_group()]
        if self.method == "ulysses":
            _divided[:] = [distributed_attention(_local_attention, mesh.get_group())]
        return model.module

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """scaled_dot_product_attention is another one."""
        context.set_rotate_method("alltoall" if self.rotate == "all-to-all" else "allgather")
        context._cp_options.enable_load_balance = self.balance
        before = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = _attention if self.method == "ring" else _ulysses
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = before
