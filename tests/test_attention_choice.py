"""Which attention kernel CUDA takes: golden tables, each line with PyTorch's function that decides it (sdp_utils.cpp)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir.cuda.attention import KERNELS, Call, choose, priority_order, refusal_of
from memir.cuda.platform import Platform, platform
from memir.errors import UsageError

TRAIN = Call("bf16", (128, 128, 128), (32, 32, 32), causal=True, needs_grad=True)


def on(gpu: str, torch: str = "2.13") -> Platform:
    return platform(gpu, torch)


def call(**changes: object) -> Call:
    """A causal training call of heads of 128, but for the changes; `head` sets all three sizes."""
    head = changes.pop("head", None)
    if isinstance(head, int):
        changes["head_sizes"] = (head, head, head)
    return replace(TRAIN, **changes)  # type: ignore[arg-type]  # names and types are those of Call, as the tests spell them


@pytest.mark.parametrize(
    ("gpu", "changes", "kernel", "refused"),
    [
        # Volta and Turing: no flash (check_flash_attention_hardware_support), efficient in f16 and f32, nothing for bf16
        ("7.0", {"dtype": "f16"}, "efficient", {"flash": "check_flash_attention_hardware_support"}),
        ("7.5", {"dtype": "f16"}, "efficient", {"flash": "check_flash_attention_hardware_support"}),
        ("7.5", {"dtype": "f32"}, "efficient", {"flash": "check_flash_attention_hardware_support"}),
        ("7.5", {}, "math", {"efficient": "check_tensor_dtype"}),
        ("7.5", {"dtype": "f16", "head": 20}, "math", {"efficient": "check_head_dim_size_mem_efficient"}),
        ("7.5", {"dtype": "f32", "head": 21}, "efficient", {}),  # minimum_gemm_alignment: 1 without tensor cores
        # Ampere: flash where it can (can_use_flash_attention)
        ("8.0", {}, "flash", {}),
        ("8.0", {"dtype": "f16", "head": 20}, "flash", {"efficient": "check_head_dim_size_mem_efficient"}),
        ("8.0", {"dtype": "f32"}, "efficient", {"flash": "check_dtypes_low_precision"}),
        ("8.0", {"dtype": "f32", "head": 6}, "math", {"efficient": "check_head_dim_size_mem_efficient"}),
        ("8.0", {"dtype": "f64"}, "math", {"efficient": "check_tensor_dtype"}),
        ("8.0", {"dropout": 0.1}, "flash", {}),
        ("8.0", {"head": 256}, "flash", {}),
        ("8.0", {"head": 264}, "efficient", {"flash": "check_head_dim_size_flash"}),
        ("8.0", {"head_sizes": (192, 192, 128)}, "efficient", {"flash": "check_head_dim_size_flash"}),  # DeepSeek's
        ("8.0", {"mask": "boolean", "causal": False}, "efficient", {"flash": "check_for_attn_mask"}),
        ("8.0", {"mask": "additive", "causal": False}, "efficient", {"flash": "check_for_attn_mask"}),
        ("8.0", {"mask": "additive", "mask_needs_grad": True}, "efficient", {"cudnn": "check_attn_mask_shape"}),
        ("8.0", {"square": False}, "efficient", {"flash": "check_flash_causal_non_square_seqlens"}),
        ("8.0", {"square": False, "causal": False}, "flash", {}),
        ("8.0", {"heads": (32, 8, 8), "grouped": True}, "flash", {"efficient": "check_batch_size_and_num_heads_dense"}),
        ("8.0", {"heads": (32, 8, 8), "grouped": True, "dtype": "f32"}, "math", {}),
        ("8.0", {"heads": (32, 8, 8), "grouped": True, "mask": "boolean"}, "math", {"flash": "check_for_attn_mask"}),
        ("8.0", {"heads": (32, 5, 5), "grouped": True}, "math", {"flash": "check_grouped_query_attention"}),
        ("8.0", {"dims": 3}, "math", {"flash": "check_tensor_shapes", "efficient": "check_tensor_shapes"}),
        ("8.0", {"last_stride_one": False}, "math", {"flash": "check_last_dim_stride_equals_1_dense"}),
        # 99 KiB of shared memory: check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        ("8.6", {"head": 192}, "flash", {}),
        ("8.6", {"head": 200}, "efficient", {"flash": "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120"}),
        ("8.9", {"head": 224}, "efficient", {"flash": "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120"}),
        ("8.9", {"head": 224, "needs_grad": False}, "flash", {}),
        ("8.9", {"head": 256}, "flash", {}),
        ("8.9", {"head": 256, "dropout": 0.1}, "efficient", {}),
        ("12.0", {"head": 200}, "efficient", {}),
        ("8.0", {"head": 200}, "flash", {}),
        # Hopper and data-centre Blackwell: cuDNN first (check_prefer_cudnn_attention)
        ("9.0", {}, "cudnn", {}),
        ("9.0", {"head": 256}, "cudnn", {}),
        ("9.0", {"dtype": "f32"}, "efficient", {"cudnn": "check_dtypes_low_precision"}),
        ("9.0", {"dropout": 0.1}, "flash", {"cudnn": "check_cudnn_dropout"}),
        ("9.0", {"dropout": 0.125}, "cudnn", {}),
        ("9.0", {"mask": "boolean", "causal": False}, "cudnn", {"flash": "check_for_attn_mask"}),
        ("9.0", {"mask": "additive", "mask_fits": False}, "efficient", {"cudnn": "check_attn_mask_shape"}),
        ("9.0", {"heads": (32, 8, 8), "grouped": True, "mask": "boolean"}, "cudnn", {}),
        ("9.0", {"head": 20}, "flash", {"cudnn": "check_cudnn_tensor_shapes"}),
        ("9.0", {"one_query": True, "one_key": True}, "flash", {"cudnn": "check_cudnn_tensor_shapes"}),
        ("9.0", {"one_query": True, "square": False, "causal": False}, "cudnn", {}),
        ("10.0", {}, "cudnn", {}),
        ("10.0", {"head": 256}, "flash", {"cudnn": "check_cudnn_tensor_shapes"}),
        ("10.0", {"head_sizes": (192, 192, 128)}, "cudnn", {"flash": "check_head_dim_size_flash"}),
        ("12.0", {}, "flash", {}),
    ],
)
def test_kernels_of_pytorch_2_13(gpu: str, changes: dict[str, object], kernel: str, refused: dict[str, str]) -> None:
    found = choose(call(**changes), on(gpu))
    assert found.kernel == kernel
    checks = {name: refusal.check for name, refusal in found.refused}
    assert {name: checks.get(name) for name in refused} == refused


@pytest.mark.parametrize(
    ("gpu", "torch", "changes", "kernel"),
    [
        ("9.0", "2.6", {}, "flash"),  # cuDNN's opt-in from 2.5.1 on: pull request 138522
        ("9.0", "2.8", {}, "flash"),
        ("9.0", "2.9", {}, "cudnn"),  # 162073
        ("9.0", "2.10", {}, "flash"),  # cuDNN newer than 9.15.0 wanted, the wheel has 9.10.2: 169849
        ("9.0", "2.11", {}, "cudnn"),  # the wheel has 9.19
        ("10.0", "2.6", {}, "math"),  # no kernels for Blackwell yet: 145602
        ("10.0", "2.7", {}, "flash"),
        ("12.1", "2.7", {}, "math"),
        ("12.1", "2.8", {}, "flash"),  # 152314
        ("9.0", "2.11", {"dropout": 0.1}, "cudnn"),
        ("9.0", "2.12", {"dropout": 0.1}, "flash"),  # sixteenths: 174245
        ("10.0", "2.9", {"head_sizes": (192, 192, 128)}, "efficient"),
        ("10.0", "2.11", {"head_sizes": (192, 192, 128)}, "cudnn"),  # 172621
        ("7.5", "2.13", {"dtype": "f16", "heads": (32, 8, 8), "grouped": True}, "math"),
        ("7.5", "2.14", {"dtype": "f16", "heads": (32, 8, 8), "grouped": True}, "efficient"),  # 191085
        ("7.5", "2.14", {"dtype": "f16", "heads": (32, 1, 1)}, "efficient"),  # 191085, without enable_gqa
        ("10.0", "2.14", {"head": 256}, "cudnn"),  # 185553
        ("10.0", "2.14", {"head": 160}, "flash"),
        ("10.0", "2.14", {"head": 160, "needs_grad": False}, "cudnn"),
    ],
)
def test_what_releases_changed(gpu: str, torch: str, changes: dict[str, object], kernel: str) -> None:
    assert choose(call(**changes), on(gpu, torch)).kernel == kernel


@pytest.mark.parametrize(
    ("gpu", "only", "changes", "kernel"),
    [
        ("8.0", "cudnn", {}, "cudnn"),  # last by default, and yet it can
        ("8.0", "efficient", {}, "efficient"),
        ("8.0", "math", {}, "math"),
        ("8.0", "flash", {"dtype": "f32"}, ""),
        ("7.5", "flash", {"dtype": "f16"}, ""),
        ("8.0", "cudnn", {"head": 256}, ""),
    ],
)
def test_one_kernel_alone(gpu: str, only: str, changes: dict[str, object], kernel: str) -> None:
    found = choose(call(**changes), on(gpu), only)
    assert found.kernel == kernel
    assert bool(found.reason(only)) == (not kernel)


CALLS = st.builds(
    Call,
    dtype=st.sampled_from(["bf16", "f16", "f32", "f64"]),
    head_sizes=st.tuples(*[st.sampled_from([20, 64, 96, 128, 192, 224, 256, 512])] * 3),
    heads=st.sampled_from([(32, 32, 32), (32, 8, 8), (32, 1, 1), (32, 5, 5)]),
    mask=st.sampled_from(["none", "boolean", "additive"]),
    mask_needs_grad=st.booleans(),
    mask_fits=st.booleans(),
    causal=st.booleans(),
    grouped=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1, 0.125]),
    needs_grad=st.booleans(),
    square=st.booleans(),
    one_query=st.booleans(),
    one_key=st.booleans(),
    dims=st.sampled_from([3, 4]),
    one_batch=st.booleans(),
    last_stride_one=st.booleans(),
)
PLATFORMS = st.builds(
    platform,
    st.sampled_from(["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]),
    st.sampled_from(["2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14"]),
)


@given(CALLS, PLATFORMS)
def test_a_kernel_is_always_found_and_the_others_are_explained(attention: Call, where: Platform) -> None:
    found = choose(attention, where)
    order = priority_order(where)
    assert sorted(order) == sorted(KERNELS)
    assert found.kernel in KERNELS
    assert refusal_of(found.kernel, attention, where) is None
    assert all(found.reason(kernel) for kernel in order[: order.index(found.kernel)])
    assert refusal_of("math", attention, where) is None


def test_the_platform_of_a_recipe() -> None:
    assert platform("", "2.13.0+cpu") == Platform((8, 0), (2, 13), 92000, (13, 0))
    assert platform("7.5", "2.5").cudnn == platform("7.5", "2.6").cudnn
    assert platform("7.5", "3.0").cudnn == platform("7.5", "2.14").cudnn
    with pytest.raises(UsageError, match="'hopper' is not a number"):
        platform("hopper")
