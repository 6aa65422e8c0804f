"""The attention kernel of a traced step by GPU and by `--attention`, what it saves, and its workspace worked out by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import memir
from memir.api import TracedProgram, program_of
from memir.errors import UsageError
from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.opset import scratch_of
from memir.ir.size import ONE, Size
from memir.recipe import Recipe

CASES = Path(__file__).parent / "cases"
GPT = str(CASES / "small_gpt.py")  # 4 heads of 8
B, S = Size.of("B"), Size.of("S")


@cache
def step(**recipe: object) -> TracedProgram:
    return program_of(GPT, Recipe(**recipe), batch=3, seq=48, cache=False, fold=False)  # type: ignore[arg-type]


def operators(program: Program) -> list[Op]:
    found: list[Op] = []
    for phase in program.phases:
        assert not any(isinstance(op, Repeat) for op in phase.ops)
        found += [op for op in phase.ops if isinstance(op, Op)]
    return found


def kernel(program: Program) -> str:
    (name,) = {op.opcode for op in operators(program) if "scaled_dot" in op.opcode or "_safe_softmax" in op.opcode} - {
        op.opcode for op in operators(program) if op.opcode.endswith("_backward")
    }
    return name.removeprefix("aten._scaled_dot_product_").removesuffix("_attention").removeprefix("aten._")


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({}, "flash"),
        ({"gpu": "8.0"}, "flash"),
        ({"gpu": "7.5"}, "safe_softmax"),  # bf16
        ({"gpu": "7.5", "dtype": "f16"}, "efficient"),
        ({"gpu": "9.0"}, "cudnn"),
        ({"attention": "efficient"}, "efficient"),
        ({"attention": "cudnn"}, "cudnn"),
        ({"attention": "math", "mode": "forward"}, "safe_softmax"),
    ],
)
def test_the_kernel_of_a_step(recipe: dict[str, object], expected: str) -> None:
    assert kernel(step(**recipe).program) == expected


def test_no_gpu_is_the_same_as_compute_capability_8() -> None:
    assert step().program == step(gpu="8.0").program


def test_a_kernel_that_cannot_run() -> None:
    with pytest.raises(UsageError) as caught:
        step(attention="flash", dtype="f32")
    assert "No available kernel. Aborting execution." in caught.value.message
    assert caught.value.where == "on sm80: flash takes f16 and bf16, not f32"
    assert caught.value.hint == "what can run there: efficient, math; PyTorch itself takes efficient"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"attention": "flash", "target": "cpu"}, "a kernel of cuda"),
        ({"attention": "flash2"}, "is none of"),
        ({"gpu": "h100"}, "no compute capability"),
    ],
)
def test_recipes_that_cannot_be_meant(recipe: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe(**recipe)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "rows"), [("efficient", "efficient"), ("cudnn", "cudnn"), ("flash", "flash")])
def test_what_a_kernel_saves(name: str, rows: str) -> None:
    """The output in the inputs' dtype and the log of the sums in fp32: [B, H, S], of efficient rounded up to 32."""
    program = step(attention=name).program
    forward = next(op for op in operators(program) if op.opcode == f"aten._scaled_dot_product_{rows}_attention")
    output, sums = forward.results[:2]
    assert output.shape[:3] == (B, Size.of(4), S)
    assert output.dtype == "bf16"
    assert sums.dtype == "f32"
    expected = (
        32 * memir.parse("memir 1\nprogram @p\ndim S\nstorage $a : ceil(S/32) buffer live_in live_out\n").storages[0].nbytes
    )
    assert sums.shape[:3] == (B, Size.of(4), expected if name == "efficient" else S)
    assert {output.storage, sums.storage} <= set(forward.saves)


# -- workspaces, worked out from the sources that memir/ir/attention.py names ------------------------------------------------


def tensor(name: str, dtype: str, *shape: int | Size, dense: str = "bhsd") -> Value:
    """A tensor [B, H, S, D] that lies in memory as its letters say."""
    extents = tuple(map(Size.of, shape))
    strides = [ONE] * 4
    step_ = ONE
    for letter in reversed(dense):
        place = "bhsd".index(letter)
        strides[place] = step_
        step_ = step_ * extents[place]
    return Value(name, dtype, extents, tuple(strides), Size.of(0), name)


def backward(name: str, dtype: str, shape: tuple[int, ...], *, kv_heads: int = 0, values: int = 0, dense: str = "bshd") -> int:
    batch, heads, length, head = shape
    key = tensor("k", dtype, batch, kv_heads or heads, length, head, dense="bshd")
    value = tensor("v", dtype, batch, kv_heads or heads, length, values or head, dense="bshd")
    out = tensor("o", dtype, batch, heads, length, values or head, dense="bshd")
    grad = tensor("g", dtype, batch, heads, length, values or head, dense=dense)
    query = tensor("q", dtype, *shape, dense="bshd")
    size = scratch_of("cuda", f"aten._scaled_dot_product_{name}_attention_backward", [grad, query, key, value, out], [])
    return size.evaluate({})


@pytest.mark.parametrize(
    ("dtype", "shape", "options", "expected"),
    [
        # heads of 64: delta + tiles of 64 x 64 in fp32 with 16 bytes each
        ("f16", (2, 16, 1024, 64), {}, 2 * 16 * 1024 * 4 + 2 * 16 * 16 * (64 * 64 * 4 + 16)),
        # 1,000 rows are 16 tiles too
        ("f16", (2, 16, 1000, 64), {}, 2 * 16 * 1000 * 4 + 2 * 16 * 16 * (64 * 64 * 4 + 16)),
        # heads of 80 take the kernel for 128: tiles of 128 x 128, so dQ is padded to 128 columns
        ("bf16", (1, 8, 512, 80), {}, 8 * 512 * 4 + 8 * 4 * (128 * 128 * 4 + 16)),
        # heads of 256: 128 x 64, and dK, dV of the keys in work; 32 sequences of 16 heads leave one split (200 / 512 is 0)
        ("bf16", (32, 16, 512, 256), {}, 512 * (512 * 4 + 4 * 4 * (128 * 64 * 4 + 16) + 64 * 512 * 4)),
        # DeepSeek's heads of 192 with values of 128: 192 is padded to 256 where it is staged
        ("bf16", (32, 8, 512, 192), {"values": 128}, 256 * (512 * 4 + 4 * 3 * (128 * 64 * 4 + 16) + 64 * 384 * 4)),
        # fp32 accumulates dK and dV in place; gradient * output, its sum and the sum transposed are more than the workspace
        ("f32", (1, 8, 512, 256), {}, 8 * 512 * (256 + 2) * 4),
        # dQ of heads of 80 is padded to 128 columns, which is more than gradient * output
        ("f32", (1, 8, 512, 80), {}, 8 * 512 * 4 + 8 * 4 * 2 * (128 * 64 * 4 + 16)),
        # a gradient that lies as [B, H, S, D] is copied
        ("f16", (2, 16, 1024, 64), {"dense": "bhsd"}, 32 * 1024 * 4 + 32 * 16 * (64 * 64 * 4 + 16) + 32 * 1024 * 64 * 2),
    ],
)
def test_workspace_of_the_efficient_backward(
    dtype: str, shape: tuple[int, ...], options: dict[str, int], expected: int
) -> None:
    assert backward("efficient", dtype, shape, **options) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "shape", "options", "expected"),
    [
        # softmax_d and dq_accum in fp32, rows rounded up to 128, columns to 32
        ("bf16", (2, 16, 1024, 64), {}, 32 * 1024 * 4 + 32 * 1024 * 64 * 4),
        ("bf16", (2, 16, 1000, 72), {}, 32 * 1024 * 4 + 32 * 1024 * 96 * 4),
        ("bf16", (1, 8, 128, 200), {}, 8 * 128 * 4 + 8 * 128 * 256 * 4),
        # grouped heads: dk and dv of all heads
        ("bf16", (1, 8, 128, 64), {"kv_heads": 2}, 8 * 128 * 4 + 8 * 128 * 64 * 4 + 2 * 8 * 128 * 64 * 2),
        ("bf16", (1, 8, 128, 64), {"dense": "bhsd"}, 8 * 128 * 4 + 8 * 128 * 64 * 4 + 8 * 128 * 64 * 2),
    ],
)
def test_workspace_of_the_flash_backward(dtype: str, shape: tuple[int, ...], options: dict[str, int], expected: int) -> None:
    assert backward("flash", dtype, shape, **options) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "head", "expected"),
    [("bf16", 128, 0), ("bf16", 136, 4 * 96 * 136 * 4), ("f32", 256, 0), ("f16", 256, 4 * 96 * 256 * 4)],
)
def test_workspace_of_the_efficient_forward(dtype: str, head: int, expected: int) -> None:
    """The output in fp32 where it does not fit registers: 16 bits and values of more than 128 a head."""
    query, key, value = (tensor(name, dtype, 1, 4, 96, head) for name in "qkv")
    found = scratch_of("cuda", "aten._scaled_dot_product_efficient_attention", [query, key, value], [])
    assert found.evaluate({}) == expected
