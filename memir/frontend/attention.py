"""`scaled_dot_product_attention` as CUDA runs it, on fake cpu tensors: the kernel that PyTorch takes there.

The choice is `memir.cuda.attention`'s, for the installed PyTorch. The GPU is taken to be of compute capability 8.0 unless the
recipe says otherwise. Kernels' workspaces are rules of `memir.ir.opset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.attention import SDPBackend, sdpa_kernel

from memir.cuda.attention import ADDITIVE, BOOLEAN, NONE, Call, Choice, choose
from memir.cuda.platform import Platform, platform
from memir.errors import UsageError
from memir.ir.dtypes import FROM_TORCH
from memir.recipe import KERNELS, Recipe

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Attention:
    """Whose kernel is taken, and which one if only one may be."""

    platform: Platform
    only: str = ""
    trains: bool = True  # the forward without gradients, which is traced beside a training step, takes the same kernels


def attention_of(recipe: Recipe) -> Callable[..., torch.Tensor]:
    """`scaled_dot_product_attention` with the kernel that the installed PyTorch takes on the recipe's GPU, or the recipe's."""
    only = recipe.attention if recipe.attention in KERNELS else ""
    return partial(_attention, _Attention(platform(recipe.gpu, torch.__version__), only, recipe.mode == "train"))


def choose_attention(
    setting: _Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """The kernel of a call of scaled_dot_product_attention: flash, efficient, cudnn or math.

    UsageError where the recipe wants one that cannot run there. Lengths may be symbols: what is not known of them without
    asking for their values counts as false, as in PyTorch's own `TORCH_GUARD_OR_FALSE`.
    """
    call = _call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, setting.trains)
    found = choose(call, setting.platform, setting.only)
    if not found.kernel:
        raise UsageError(
            f"--attention {setting.only}: PyTorch refuses: RuntimeError: No available kernel. Aborting execution.",
            where=f"on {setting.platform.sm}: {found.reason(setting.only)}",
            hint=_others(call, setting.platform, found),
        )
    return found.kernel


def _others(call: Call, where: Platform, found: Choice) -> str:
    able = [kernel for kernel in KERNELS if not found.reason(kernel)]
    return f"what can run there: {', '.join(able)}; PyTorch itself takes {choose(call, where).kernel}"


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    trains: bool,
) -> Call:
    tensors = (query, key, value)
    needs_grad = any(t.requires_grad for t in tensors) if torch.is_grad_enabled() else trains
    three = query.dim() > 2 and key.dim() > 2 and value.dim() > 2
    return Call(
        dtype=FROM_TORCH[str(query.dtype).removeprefix("torch.")],
        head_sizes=(query.size(-1), key.size(-1), value.size(-1)),
        heads=(query.size(-3), key.size(-3), value.size(-3)) if three else (1, 1, 1),
        mask=NONE if mask is None else BOOLEAN if mask.dtype == torch.bool else ADDITIVE,
        mask_needs_grad=mask is not None and mask.requires_grad,
        mask_fits=mask is None or _fits(mask, query, key),
        causal=is_causal,
        grouped=enable_gqa,
        dropout=dropout_p,
        needs_grad=needs_grad,
        square=_same(query.size(-2), key.size(-2)),
        one_query=_same(query.size(-2), 1),
        one_key=_same(key.size(-2), 1),
        dims=query.dim() if query.dim() == key.dim() == value.dim() else 0,
        one_batch=not three or all(_same(t.size(0), query.size(0)) for t in (key, value)),
        last_stride_one=all(_same(t.stride(-1), 1) for t in (*tensors, *([] if mask is None else [mask]))),
    )


def _same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two extents are equal whatever the symbols are."""
    return bool(statically_known_true(a == b))


def _fits(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """sdp_utils_cpp.h, `check_attn_mask_shape`: two or four dimensions, each that of the scores or 1."""
    if mask.dim() not in (2, 4) or query.dim() != 4:
        return False
    scores = (query.size(0), query.size(1), query.size(2), key.size(2))
    return all(_same(a, b) or _same(a, 1) for a, b in zip(mask.shape, scores[-mask.dim() :], strict=True))


def _attention(
    setting: _Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """aten/src/ATen/native/transformers/attention.cpp, `scaled_dot_product_attention`, after the choice of the kernel."""
    if torch.is_autocast_enabled("cpu"):  # aten/src/ATen/autocast_mode.h: it is of the lower precision list, floating masks too
        query, key, value = (_autocast(t) for t in (query, key, value))
        attn_mask = None if attn_mask is None else _autocast(attn_mask)
    kernel = choose_attention(setting, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    out: torch.Tensor
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    head = query.size(-1)
    if kernel == "flash":
        padding = -head % 8  # `pad_last_dim<8>`
        if padding:
            scale = head**-0.5 if scale is None else scale
            query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head] if padding else out
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if kernel == "cudnn":
        bias = None if attn_mask is None else _as_numbers(attn_mask, query)
        fused = aten._scaled_dot_product_cudnn_attention(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale)
        out = fused[0]
        return out
    if attn_mask is not None:
        attn_mask = _additive_mask(attn_mask, query, key)
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.get_autocast_dtype("cpu")) if tensor.is_floating_point() else tensor


def _additive_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """attention.cpp: `convert_boolean_attn_mask`, then `preprocess_mask` with `pad_bias<16>`: padded to 16."""
    mask = _as_numbers(mask, query)
    length = mask.size(-1)
    padding = 16 - length % 16
    if padding != 16:
        mask = F.pad(mask, (0, padding))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _as_numbers(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """attention.cpp, `convert_boolean_attn_mask`: 0 where a boolean mask is true, -inf where it is not."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype))
