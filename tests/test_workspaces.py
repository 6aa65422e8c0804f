"""Workspaces of CUDA's norms, embeddings and reductions, worked out by hand from the sources that workspaces.py names."""

from __future__ import annotations

from pathlib import Path

import pytest

from memir.api import program_of
from memir.cuda.platform import multiprocessors, threads_of_multiprocessor
from memir.frontend.uncounted import uncounted
from memir.ir.core import Value
from memir.ir.opset import scratch_of
from memir.ir.size import Size
from memir.ir.workspaces import embedding_backward, shared_sum
from memir.recipe import Recipe

GPT = str(Path(__file__).parent / "cases" / "small_gpt.py")


def tensor(name: str, dtype: str, *shape: int, strides: tuple[int, ...] = ()) -> Value:
    steps, step = [], 1
    for extent in reversed(shape):
        steps.insert(0, step)
        step *= extent
    return Value(name, dtype, tuple(map(Size.of, shape)), tuple(map(Size.of, strides or steps)), Size.of(0), name)


@pytest.mark.parametrize(
    ("rows", "width", "sms", "expected"),
    [
        # vectors of 4, 32 threads across and 4 down, 6 blocks across; 108 * 16 blocks aimed at, 288 for each column;
        # 4,096 values of a thread in pieces of 16 are 256 blocks; fp32 for each column, block, thread across and element
        (16384, 768, 108, 4 * 768 * 256 * 32 * 4),
        (65536, 768, 108, 4 * 768 * 288 * 32 * 4),  # as many as are aimed at
        (16384, 16384, 108, 4 * 16384 * 16 * 32 * 4),  # at most 256 values of a thread
        (1000, 768, 108, 0),  # 250 values of a thread: one block does it
        (16384, 50257, 108, 0),  # no vectors; 1,571 blocks across are more than the 432 aimed at
        (16384, 2304, 40, 4 * 2304 * 36 * 32 * 4),  # 640 blocks aimed at, 18 across
    ],
)
def test_a_sum_over_rows(rows: int, width: int, sms: int, expected: int) -> None:
    assert shared_sum(rows, width, "bf16", sms) == expected


def test_an_embeddings_gradient() -> None:
    assert embedding_backward(3072, 32000, 4096, "bf16") == 0
    pieces = 16384 // 10 + 16384
    assert embedding_backward(16384, 32000, 4096, "bf16") == 8 * (5 * 16384 + 2) + pieces * (8 + 4 * 4096)
    assert embedding_backward(16384, 512, 64, "f32") == 8 * (3 * 16384 + 2 * 512 + 2) + (1638 + 512) * (8 + 4 * 64)


def test_layer_norms_gradient_is_copied_where_it_is_not_contiguous() -> None:
    x = tensor("x", "bf16", 4, 8)
    for opcode in ("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"):
        assert scratch_of("cuda", opcode, [tensor("g", "bf16", 4, 8), x], [x]) == Size.of(0)
        assert scratch_of("cuda", opcode, [tensor("g", "bf16", 4, 8, strides=(1, 4)), x], [x]) == Size.of(64)


def test_the_norms_of_a_list_have_a_number_for_each_chunk_of_the_largest() -> None:
    lists = [tensor("a", "bf16", 1024, 1024), tensor("b", "bf16", 8), tensor("c", "bf16", 65537)]
    assert scratch_of("cuda", "aten._foreach_norm.Scalar", lists, []) == Size.of(4 * 3 * 16)
    assert scratch_of("cuda", "aten.mm", [tensor("a", "bf16", 2, 2)], []) == Size.of(0)


def test_multiprocessors_are_those_of_the_largest_card() -> None:
    assert [multiprocessors(gpu) for gpu in ("", "8.0", "7.5", "9.0")] == [108, 108, 72, 132]
    assert multiprocessors("3.5") == 108
    assert [threads_of_multiprocessor(gpu) for gpu in ("", "7.5", "8.9")] == [2048, 1024, 1536]
    assert shared_sum(16384, 2304, "bf16", 40, 1024) == 4 * 2304 * 18 * 32 * 4  # half as many blocks


def test_what_is_not_counted_is_told_at_the_asked_point() -> None:
    traced = program_of(GPT, Recipe(), batch=64, seq=64, cache=False)
    (told,) = [text for text in traced.assumptions if text.startswith("not counted")]
    assert told.startswith("not counted: workspaces alive during one operator; at B=64, S=64 ")
    assert not any("without a rule" in text for text in traced.assumptions)
    assert uncounted(traced.program, {**traced.env, "B": 1, "S": 8}, "") == ""
