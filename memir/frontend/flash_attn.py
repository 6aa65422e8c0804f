"""flash-attn 2, the package, as Hugging Face's models call it, described without the package: `--attention flash-attn-2`.

Sources: flash_attn/flash_attn_interface.py, `FlashAttnFunc`, and csrc/flash_attn/flash_api.cpp, `mha_fwd` and `mha_bwd`, as of
2.8; transformers/modeling_flash_attention_utils.py, `_flash_attention_forward`. Tensors are [B, S, H, D], grouped keys and
values are taken as they are, and no 4-D mask is made. Heads are padded to a multiple of 8. Kept for backward: query, key,
value, output, the log of the sums in fp32 [B, H, S], and two numbers of the random generator. The workspace of the backward
is a rule of `memir.ir.attention`. Not described: batches with padding and packed ones (`flash_attn_varlen_func`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)

from memir.errors import InconclusiveError, UsageError

NAME = "flash-attn-2"
_UTILS = "transformers.modeling_flash_attention_utils"
_LARGEST_HEAD = 256


@torch.library.custom_op("memir_flash_attn::_flash_attn_forward", mutates_args=())
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, the log of the sums [B, H, S], and the generator's state (`mha_fwd`; the scores are returned for tests only)."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length, heads, _ = q.shape
    return torch.empty_like(q), q.new_empty((batch, heads, length), dtype=torch.float32), q.new_empty((2,), dtype=torch.int64)


@torch.library.custom_op("memir_flash_attn::_flash_attn_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value (`mha_bwd`; the caller has made them)."""
    raise RuntimeError("memir's operators describe memory; they are never run")


@_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _FlashAttention(torch.autograd.Function):
    """`FlashAttnFunc`."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        head = tensors[0].size(3)
        q, k, v = (F.pad(t, (0, 8 - head % 8)) if head % 8 else t for t in tensors)
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        out, sums, generator = _forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, sums, generator)
        result: torch.Tensor = out[..., :head]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        q, k, v, out, sums, _ = ctx.saved_tensors
        head = grad.size(3)
        if head % 8:
            grad = F.pad(grad, (0, 8 - head % 8))
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return tuple(t[..., :head] for t in _backward(grad, q, k, v, out, sums))


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """The package's function of that name; what it refuses is a UsageError."""
    head = q.size(3)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(
            f"--attention {NAME}: flash-attn refuses: FlashAttention only support fp16 and bf16 data type",
            where=f"query is {str(q.dtype).removeprefix('torch.')}",
            hint="use  --dtype bf16  or  --amp bf16",
        )
    if head > _LARGEST_HEAD:
        raise UsageError(f"--attention {NAME}: flash-attn takes heads of at most {_LARGEST_HEAD}, and this model's have {head}")
    attended: torch.Tensor = _FlashAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return attended


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """The package's function for sequences of several lengths."""
    raise InconclusiveError(
        f"--attention {NAME}: batches with padding or packed sequences are not described (flash_attn_varlen_func)",
        hint="use  --batch-kind full",
    )


@contextmanager
def installed() -> Iterator[None]:
    """Within, transformers builds models for flash-attn 2 and calls the functions above, with or without the package."""
    import transformers.modeling_flash_attention_utils as utils
    import transformers.modeling_utils as models

    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        if hasattr(utils, "lazy_import_flash_attention"):  # transformers 4.53 and newer
            arguments = utils._lazy_define_process_function(flash_attn_varlen_func)
            loaded = ((flash_attn_func, flash_attn_varlen_func, None, None, None), (arguments, arguments))
            for module in (utils, models):
                put(module, "lazy_import_flash_attention", lambda *_, **__: loaded)
        for name, value in (
            ("flash_attn_func", flash_attn_func),
            ("flash_attn_varlen_func", flash_attn_varlen_func),
            ("_flash_supports_window_size", True),
        ):
            put(utils, name, value)
        for name, module in list(sys.modules.items()):  # before 4.49 models imported it only where the package is there
            if name.startswith("transformers.models.") and "is_flash_attn_2_available" in vars(module):
                put(module, "_flash_attention_forward", utils._flash_attention_forward)
        base = models.PreTrainedModel
        if hasattr(base, "_check_and_enable_flash_attn_2"):
            put(base, "_check_and_enable_flash_attn_2", classmethod(_enable))
        else:
            put(base, "_flash_attn_can_dispatch", _can_dispatch)
            table = getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {2: {}})
            stack.enter_context(mock.patch.dict(table[2], {"general_availability_check": lambda *_, **__: True}))
        yield


def _enable(cls: Any, config: Any, /, *_: Any, hard_check_only: bool = False, **__: Any) -> Any:
    """`PreTrainedModel._check_and_enable_flash_attn_2` (transformers before 5.0) without its look at the machine."""
    _can_dispatch(cls)
    if not hard_check_only:
        config._attn_implementation = "flash_attention_2"
    return config


def _can_dispatch(model: Any, *_: Any, **__: Any) -> bool:
    """`PreTrainedModel._flash_attn_can_dispatch` without its look at the machine."""
    if not (getattr(model, "_supports_flash_attn", False) or getattr(model, "_supports_flash_attn_2", False)):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise UsageError(
            f"--attention {NAME}: transformers has no flash-attn 2 for {name}", hint="use  --attention sdpa  or  eager"
        )
    return True
