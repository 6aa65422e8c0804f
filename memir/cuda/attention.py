"""Which kernel `scaled_dot_product_attention` takes on CUDA, and why it takes none of the others.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`: kernels are tried in `priority_order`, and
the first whose every check passes is taken. A check here is named as PyTorch's function is, and refuses in the same order.
What differs between releases was read in that file as of 2.6, 2.9 and main of August 2026, and in the pull requests that are
named where it does. Left out: nested tensors, empty sequences, batches of more than 65,535 sequences (cuDNN since 2.13),
deterministic algorithms, kernels that a user switches off otherwise than with `only`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memir.cuda.platform import Platform

KERNELS = ("flash", "efficient", "cudnn", "math")
HALF = ("f16", "bf16")
NONE, BOOLEAN, ADDITIVE = "none", "boolean", "additive"  # kinds of mask


@dataclass(frozen=True, slots=True)
class Call:
    """What of a call decides: never the lengths themselves, which may be symbols."""

    dtype: str  # of query, key and value: "bf16"
    head_sizes: tuple[int, int, int]  # of query, key, value
    heads: tuple[int, int, int] = (1, 1, 1)  # number of heads of query, key, value
    mask: str = NONE  # "none", "boolean" or "additive": attn_mask
    mask_needs_grad: bool = False
    mask_fits: bool = True  # two or four dimensions, each the scores' or 1
    causal: bool = False  # is_causal
    grouped: bool = False  # enable_gqa
    dropout: float = 0.0
    needs_grad: bool = False  # of query, key or value, while gradients are recorded
    square: bool = True  # query and key have the same length
    one_query: bool = False  # the query's length is 1
    one_key: bool = False  # the key's length is 1
    dims: int = 4  # of query, key and value
    one_batch: bool = True  # query, key and value have the same batch size
    last_stride_one: bool = True  # of query, key, value and a mask


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a kernel is not taken: PyTorch's function that refuses, and what it wants."""

    check: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that runs; "" where the one that was asked for cannot. The others that were refused, each with its reason."""

    kernel: str
    refused: tuple[tuple[str, Refusal], ...]

    def reason(self, kernel: str) -> str:
        """Why that kernel was refused; empty where it was not."""
        return next((refusal.reason for name, refusal in self.refused if name == kernel), "")


def choose(call: Call, platform: Platform, only: str = "") -> Choice:
    """The kernel that PyTorch takes; with `only`, as within `torch.nn.attention.sdpa_kernel` of that one."""
    refused = tuple((kernel, refusal) for kernel in KERNELS if (refusal := refusal_of(kernel, call, platform)) is not None)
    names = {name for name, _ in refused}
    order = (only,) if only else priority_order(platform)
    return Choice(next((kernel for kernel in order if kernel not in names), ""), refused)


def priority_order(platform: Platform) -> tuple[str, ...]:
    """The order in which kernels are tried (`priority_order`; aten/src/ATen/Context.h, `sdp_priority_order`)."""
    if _prefers_cudnn(platform):
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "efficient", "math", "cudnn")


def _prefers_cudnn(platform: Platform) -> bool:
    """`check_prefer_cudnn_attention`, without its environment variables.

    Off from 2.5.1 to 2.8 (pull request 138522); since 2.9 on for Hopper and Blackwell with cuDNN 9.9 or newer (162073), which
    2.10 made newer than 9.15.0 (169849), so that only wheels with CUDA 13 have it; minor version 3 since 2.11 (170800).
    """
    major, minor = platform.capability
    if platform.torch < (2, 9) or major not in (9, 10):
        return False
    if platform.torch < (2, 10):
        return platform.cudnn >= 90900 and minor == 0
    return platform.cudnn > 91500 and (minor == 0 or (minor == 3 and platform.torch >= (2, 11)))


def refusal_of(kernel: str, call: Call, platform: Platform) -> Refusal | None:
    """The first check of a kernel that the call does not pass; None where the kernel can run."""
    return next(_CHECKS[kernel](call, platform), None)


def _flash(call: Call, platform: Platform) -> Iterator[Refusal]:
    """`can_use_flash_attention`."""
    query, key, value = call.head_sizes
    yield from _four_dims(call)
    if call.mask != NONE:
        yield Refusal("check_for_attn_mask", "flash takes no attn_mask")
    if not (query == key == value <= 256):
        text = f"flash needs one head size of query, key and value, at most 256, not {query}, {key}, {value}"
        yield Refusal("check_head_dim_size_flash", text)
    yield from _hardware("check_flash_attention_hardware_support", "flash", (8, 0), platform)
    yield from _wide_heads_in_backward(call, platform)
    if call.causal and not call.square:
        yield Refusal("check_flash_causal_non_square_seqlens", "flash takes is_causal only for query and key of one length")
    yield from _half(call, "check_dtypes_low_precision", "flash")
    yield from _heads(call, "flash", groups=True, implicit=platform.torch >= (2, 14))
    yield from _strides(call)


def _wide_heads_in_backward(call: Call, platform: Platform) -> Iterator[Refusal]:
    """GPUs with 99 KiB of shared memory a block; those of compute capability 12 since PyTorch has kernels for them."""
    small = (8, 6) <= platform.capability <= (8, 9) or (12, 0) <= platform.capability <= (12, 1)
    size = call.head_sizes[0]
    if call.needs_grad and small and size > 192 and (size <= 224 or call.dropout > 0):
        text = f"flash has no backward for heads of {size}{' with dropout' if size > 224 else ''} on {platform.sm}"
        yield Refusal("check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120", text)


def _efficient(call: Call, platform: Platform) -> Iterator[Refusal]:
    """`can_use_mem_efficient_attention`; grouped heads since 2.14 (pull request 191085)."""
    query, key, value = call.head_sizes
    yield from _hardware("check_mem_efficient_hardware_support", "efficient", (5, 0), platform)
    yield from _four_dims(call)
    step = alignment(call.dtype, platform)
    if query != key or query % step or value % step:
        text = f"efficient needs head sizes that {step} divides, not {query}, {key}, {value}"
        yield Refusal("check_head_dim_size_mem_efficient", text)
    yield from _strides(call)
    yield from _heads(call, "efficient", groups=platform.torch >= (2, 14), implicit=platform.torch >= (2, 14))
    if call.dtype not in (("f16", "f32") if platform.capability < (8, 0) else ("f16", "f32", "bf16")):
        yield Refusal("check_tensor_dtype", f"efficient has no kernel for {call.dtype} on {platform.sm}")


def alignment(dtype: str, platform: Platform) -> int:
    """`minimum_gemm_alignment`: elements; 16 bytes where tensor cores are used, which Volta's and Turing's are for f16 only."""
    half = dtype in HALF
    if platform.capability >= (8, 0):
        return 8 if half else 4
    return 8 if half and platform.capability >= (7, 0) else 1


def _cudnn(call: Call, platform: Platform) -> Iterator[Refusal]:
    """`can_use_cudnn_attention`."""
    if call.dropout > 0 and 91100 < platform.cudnn < 91400:
        yield Refusal("can_use_cudnn_attention", "cuDNN 9.11 to 9.13 has no dropout in attention")
    yield from _four_dims(call)
    yield from _half(call, "check_dtypes_low_precision", "cudnn")
    if call.mask != NONE and call.mask_needs_grad:
        yield Refusal("check_attn_mask_shape", "cudnn takes no attn_mask that needs a gradient")
    if call.mask != NONE and not call.mask_fits:
        yield Refusal("check_attn_mask_shape", "cudnn needs an attn_mask of two or four dimensions, each the scores' or 1")
    yield from _hardware("check_cudnn_hardware_support", "cudnn", (8, 0), platform)
    if platform.torch >= (2, 12) and call.dropout * 16 != int(call.dropout * 16):  # pull request 174245
        yield Refusal("check_cudnn_dropout", f"cudnn takes dropout in sixteenths, not {call.dropout:g}")
    yield from _strides(call)
    if platform.torch >= (2, 8):
        yield from _heads(call, "cudnn", groups=True, implicit=platform.torch >= (2, 14), same_key_value=False)
    yield from _cudnn_shapes(call, platform)


def _cudnn_shapes(call: Call, platform: Platform) -> Iterator[Refusal]:
    """`check_cudnn_tensor_shapes` and, since 2.14, `check_cudnn_d256_bprop_head_dim`."""
    query, _, value = call.head_sizes
    limit = _cudnn_limit(query, value, platform)
    if query > limit or value > limit:
        yield Refusal("check_cudnn_tensor_shapes", f"cudnn needs head sizes of at most {limit}, not {query} and {value}")
    if query % 8 or value % 8:
        yield Refusal("check_cudnn_tensor_shapes", f"cudnn needs head sizes that 8 divides, not {query} and {value}")
    single = call.one_key or (call.one_query and (call.dropout > 0 or platform.torch < (2, 9)))
    if single:
        yield Refusal("check_cudnn_tensor_shapes", f"cudnn takes no {'key' if call.one_key else 'query'} of length 1 here")
    wide = platform.torch >= (2, 14) and limit == 256 and call.needs_grad
    if wide and not (max(query, value) <= 128 or (query, value) in ((192, 128), (256, 256))):
        yield Refusal("check_cudnn_d256_bprop_head_dim", f"cudnn has no backward for head sizes of {query} and {value}")


def _cudnn_limit(query: int, value: int, platform: Platform) -> int:
    """The largest head size: 128; 256 on Hopper from 2.9 to 2.13 with cuDNN 9.10 (pull request 161210); since 2.14 there and on
    data-centre Blackwell with cuDNN newer than 9.22 (185553); 192 with values of 128 on the latter since 2.11 (172621).
    """
    hopper, blackwell = platform.capability == (9, 0), platform.capability[0] == 10
    if platform.torch >= (2, 14) and platform.cudnn > 92200 and (hopper or blackwell):
        return 256
    if (2, 9) <= platform.torch < (2, 14) and platform.cudnn >= 91000 and hopper:
        return 256
    deepseek = (query, value) == (192, 128) and platform.cudnn >= 91100
    if deepseek and ((blackwell and platform.torch >= (2, 11)) or (hopper and platform.torch >= (2, 14))):
        return 192
    return 128


def _math(call: Call, platform: Platform) -> Iterator[Refusal]:
    """The composed operators take everything."""
    yield from ()


def _four_dims(call: Call) -> Iterator[Refusal]:
    if call.dims != 4:
        yield Refusal("check_tensor_shapes", f"fused kernels take tensors of 4 dimensions, not {call.dims}")


def _hardware(check: str, kernel: str, first: tuple[int, int], platform: Platform) -> Iterator[Refusal]:
    """The newest GPU that has kernels: Hopper in 2.6, consumer Blackwell since 2.7 (pull request 145602), sm121 since 2.8
    (152314).
    """
    last = (9, 0) if platform.torch < (2, 7) else (12, 0) if platform.torch < (2, 8) else (12, 1)
    if not first <= platform.capability <= last:
        yield Refusal(check, f"{kernel} has kernels for sm{first[0]}{first[1]} to sm{last[0]}{last[1]}, not {platform.sm}")


def _half(call: Call, check: str, kernel: str) -> Iterator[Refusal]:
    """`check_dtypes_low_precision`; GPUs before compute capability 8.0, where bf16 is refused too, are refused anyway."""
    if call.dtype not in HALF:
        yield Refusal(check, f"{kernel} takes f16 and bf16, not {call.dtype}")


def _heads(call: Call, kernel: str, *, groups: bool, implicit: bool, same_key_value: bool = True) -> Iterator[Refusal]:
    """`check_batch_size_and_num_heads_dense`; `implicit`: one head of key and value counts as grouped without enable_gqa."""
    check = "check_batch_size_and_num_heads_dense"
    query, key, value = call.heads
    if not call.one_batch:
        yield Refusal(check, "fused kernels need query, key and value of one batch size")
    if query == key == value or (implicit and (key, value) == (1, 1)):
        return
    if not (call.grouped and groups):
        yield Refusal(check, f"{kernel} needs as many heads of key and value as of query, not {query}, {key}, {value}")
    elif (same_key_value and key != value) or query % key or query % value:
        yield Refusal(
            "check_grouped_query_attention", f"heads of key and value must divide the query's {query}: {key}, {value}"
        )


def _strides(call: Call) -> Iterator[Refusal]:
    if not call.last_stride_one:
        yield Refusal("check_last_dim_stride_equals_1_dense", "fused kernels need a last dimension of stride 1")


_CHECKS: dict[str, Callable[[Call, Platform], Iterator[Refusal]]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": _math,
}
