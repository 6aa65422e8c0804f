"""Dimension rules: where a divided dimension of one tensor goes in the others."""

from __future__ import annotations

from memir.ir.core import Op, Value
from memir.ir.dims import Spread, spread
from memir.ir.layout import contiguous
from memir.ir.reshape import Part, permuted, quotient, reshaped
from memir.ir.size import ONE, ZERO, Size
from memir.ir.sizetext import parse_size

B, S = Size.of("B"), Size.of("S")


def sizes(*extents: int | str | Size) -> tuple[Size, ...]:
    return tuple(e if isinstance(e, Size) else parse_size(str(e)) for e in extents)


def value(name: str, *extents: int | str | Size, strides: tuple[int | str, ...] | None = None, offset: int = 0) -> Value:
    shape = sizes(*extents)
    return Value(name, "f32", shape, contiguous(shape) if strides is None else sizes(*strides), Size.of(offset), name)


def went(opcode: str, operands: list[Value], results: list[Value], slot: int, part: Part) -> Spread:
    found = spread(Op(opcode, tuple(o.name for o in operands), tuple(results)), operands, results, slot, part)
    assert found is not None
    return found


def test_product_column_row_and_tokens() -> None:
    x, w, y = value("x", "B*S", 64), value("w", 64, 256), value("y", "B*S", 256)
    assert went("aten.mm", [x, w], [y], 1, Part(1)) == Spread(((-1, Part(1)),))
    assert went("aten.mm", [x, w], [y], -1, Part(0, B)) == Spread(((0, Part(0, B)),))
    row = went("aten.mm", [x, w], [y], 0, Part(1))
    assert (row.parts, row.partial) == (((1, Part(0)),), (-1,))


def test_bias_goes_with_the_columns() -> None:
    bias, x, w, y = value("b", 256), value("x", "B*S", 64), value("w", 64, 256), value("y", "B*S", 256)
    assert dict(went("aten.addmm", [bias, x, w], [y], 2, Part(1)).parts) == {0: Part(0), -1: Part(1)}


def test_heads_through_view_and_transpose() -> None:
    flat, heads = value("y", B, S, 2048), value("v", B, S, 32, 64)
    assert went("aten.view", [flat], [heads], 0, Part(2)) == Spread(((-1, Part(2)),))
    turned = value("t", B, 32, S, 64, strides=("2048*S", 64, 2048, 1))
    assert went("aten.transpose.int", [heads], [turned], -1, Part(1)) == Spread(((0, Part(2)),))


def test_three_tensors_beside_one_another() -> None:
    whole = value("qkv", B, S, 96)
    q, k, v = (value(n, B, S, 32, strides=("96*S", 96, 1), offset=o) for n, o in (("q", 0), ("k", 32), ("v", 64)))
    found = dict(went("aten.split.Tensor", [whole], [q, k, v], -1, Part(2)).parts)
    assert found == {0: Part(2, Size.of(3)), -2: Part(2), -3: Part(2)}
    assert dict(went("aten.split.Tensor", [whole], [q, k, v], 0, Part(2, Size.of(3))).parts)[-3] == Part(2)
    assert went("aten.split.Tensor", [whole], [q, k, v], 0, Part(2)).barrier


def test_tokens_within_rows() -> None:
    assert reshaped(Part(1), sizes(B, S, 8), sizes("B*S", 8)) == Part(0, B)
    assert reshaped(Part(0, B), sizes("B*S", 8), sizes(B, S, 8)) == Part(1)
    assert reshaped(Part(1), sizes(B, 4, 1, S, 64), sizes(B, 4, S, 64)) == Part(1)
    assert reshaped(Part(1), sizes(B, 4, 8, S, 64), sizes(B, 32, S, 64)) == Part(1)
    assert reshaped(Part(2), sizes(6, 4), sizes(24)) is None


def test_groups_of_heads_that_share_one() -> None:
    """repeat_interleave: each of 4 key-value heads stands for 8; a part is of the 4."""
    one, eight = value("k", B, 4, 1, S, 64), value("e", B, 4, 8, S, 64, strides=("256*S", 64, 0, 256, 1))
    assert went("aten.expand", [one], [eight], -1, Part(1)) == Spread(((0, Part(1)),))
    total = went("aten.sum.dim_IntList", [eight], [one], 0, Part(1))
    assert total == Spread(((-1, Part(1)),))


def test_norm_needs_its_dimension_and_sums_its_weight() -> None:
    g, x, mean, rstd, w = (value("g", B, S, 8), value("x", B, S, 8), value("m", B, S, 1), value("r", B, S, 1), value("w", 8))
    dx, dw = value("dx", B, S, 8), value("dw", 8)
    assert went("aten.native_layer_norm_backward", [g, x, mean, rstd, w], [dx, dw], 1, Part(2)).barrier
    found = went("aten.native_layer_norm_backward", [g, x, mean, rstd, w], [dx, dw], 1, Part(1))
    assert dict(found.parts) == {0: Part(1), 2: Part(1), 3: Part(1), -1: Part(1)}
    assert found.partial == (-2,)


def test_mean_is_a_barrier_where_a_sum_is_partial() -> None:
    x, row = value("x", B, S, 8), value("r", B, S, 1)
    assert went("aten.mean.dim", [x], [row], 0, Part(2)).barrier
    assert went("aten.sum.dim_IntList", [x], [row], 0, Part(2)).partial == (-1,)
    assert dict(went("aten.mean.dim", [x], [row], 0, Part(1)).parts) == {-1: Part(1)}


def test_attention_divides_sequences_and_heads_only() -> None:
    q, k = value("q", B, 8, S, 16), value("k", B, 2, S, 16)
    out, lse = value("o", B, 8, S, 16), value("l", B, 8, S)
    found = went("aten._scaled_dot_product_flash_attention", [q, k, k], [out, lse], 0, Part(1))
    assert dict(found.parts) == {1: Part(1), 2: Part(1), -1: Part(1), -2: Part(1)}
    assert went("aten._scaled_dot_product_flash_attention", [q, k, k], [out, lse], 0, Part(2)).barrier


def test_rows_of_a_table_make_a_partial_sum() -> None:
    w, ids, out = value("w", 100, 8), value("i", B, S), value("o", B, S, 8)
    assert went("aten.embedding", [w, ids], [out], 0, Part(0)).partial == (-1,)
    assert went("aten.embedding", [w, ids], [out], 0, Part(1)).barrier


def test_broadcast_operands_stay_whole() -> None:
    x, scale, out = value("x", B, S, 8), value("s", B, S, 1), value("o", B, S, 8)
    assert dict(went("aten.mul.Tensor", [x, scale], [out], 0, Part(2)).parts) == {-1: Part(2)}
    assert dict(went("aten.mul.Tensor", [x, scale], [out], -1, Part(1)).parts) == {0: Part(1), 1: Part(1)}


def test_no_rule() -> None:
    x = value("x", B, 8)
    assert spread(Op("aten.mystery", ("x",), (x,)), [x], [x], 0, Part(0)) is None


def test_permutation_by_strides() -> None:
    assert permuted(value("a", 2, 3, 4), value("b", 4, 2, 3, strides=(1, 12, 4))) == (2, 0, 1)
    assert permuted(value("a", 2, 3), value("b", 3, 3, strides=(1, 3))) is None


def test_quotients() -> None:
    assert quotient(parse_size("6*B*S - 4*B"), parse_size("2*B")) == parse_size("3*S - 2")
    assert quotient(parse_size("6*S"), parse_size("4*S")) is None
    assert quotient(S, B) is None
    assert quotient(parse_size("S - 1"), parse_size("S - 1")) is ONE
    assert quotient(ZERO, B) is ZERO
