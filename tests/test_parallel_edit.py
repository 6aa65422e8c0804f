"""Edits of flat programs and parameters as shards (memir.parallel), on a program that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.parser import parse
from memir.ir.size import ONE, ZERO, Size
from memir.ir.unroll import unroll
from memir.ir.verify import verify
from memir.parallel.edit import Edit
from memir.parallel.mesh import check_axis, mesh_text, ranks
from memir.parallel.shards import Shard, gradients_of, shard_states
from memir.parallel.units import ROOT, units_of
from memir.rewrite.flow import Flow

TEXT = """memir 1
program @step
dim B
storage $wte : 400 parameter live_in live_out
storage $layers.*.up[:2] : 400 parameter live_in live_out
storage $wte.m : 800 optimizer_state of $wte live_in live_out
storage $wte.step : 4 optimizer_state on host of $wte live_in live_out
storage $ids : 8*B input live_in live_out
storage $g : 400 gradient of $wte
storage $h : 40*B activation
storage $k[:2] : 40*B activation
storage $root : 800 temporary
storage $norm : 4 temporary
value %wte: f32[10, 10] in $wte
value %up[:2]: f32[10, 10] in $layers.*.up[:2]
value %m: f64[10, 10] in $wte.m
value %step: f32[] in $wte.step
value %ids: i64[B] in $ids
phase forward
  %h: f32[B, 10] in $h = aten.embedding(%wte, %ids) at @wte
  %k[0]: f32[B, 10] in $k[0] = aten.mm(%h, %up[0]) frees $h at @layers.0
  %k[1]: f32[B, 10] in $k[1] = aten.mm(%k[0], %up[1]) frees $k[0] at @layers.1
phase backward
  %g: f32[10, 10] in $g = aten.embedding_dense_backward(%k[1]) frees $k[1]
  %gt: f32[10, 10] strides[1, 10] in $g = aten.t(%g)
phase optimizer
  %norm: f32[] in $norm = aten._foreach_norm.Scalar(%gt)
  aten._foreach_mul_.Tensor(%gt, %norm) frees $norm
  aten._foreach_add_.Scalar(%step)
  %root: f64[10, 10] in $root = aten._foreach_sqrt(%m)
  aten._foreach_addcdiv_.ScalarList(%wte, %gt, %root) frees $root, $g
"""


def flow() -> Flow:
    return Flow(unroll(parse(TEXT)))


def test_units_are_the_layers_and_the_rest() -> None:
    units = units_of(flow())
    assert [(u.layer, u.path, [s.name for s in u.parameters]) for u in units] == [
        (ROOT, "", ["wte"]),
        (0, "layers.0", ["layers.*.up[0]"]),
        (1, "layers.1", ["layers.*.up[1]"]),
    ]


def test_a_shard_goes_through_states_clipping_and_step() -> None:
    edit = Edit(flow())
    shape = (Size.of(5), Size.of(10))
    gradient = Value("g.shard", "f32", shape, (Size.of(10), ONE), ZERO, "g.shard")
    edit.declare(Storage("g.shard", Size.of(200), Kind.GRADIENT, of="wte"))
    last = len(edit.flow.ops) - 1
    reduce = edit.flow.made["gt"]
    freed = edit.take_free("g")
    assert freed == last
    edit.after(reduce, Op("c10d.reduce_scatter", ("g",), (gradient,), frees=("g",)))
    edit.put(last, replace(edit.op(last), frees=(*edit.op(last).frees, "g.shard")))
    edit.before(
        0, Op("c10d.all_gather", ("wte",), (Value("wte.full", "f32", (ONE * 10, ONE * 10), (ONE * 10, ONE), ZERO, "full"),))
    )
    edit.declare(Storage("full", Size.of(400), Kind.COLLECTIVE))
    edit.rename(0, {"wte": "wte.full"})
    edit.free_after("h", 1)
    edit.put(0, replace(edit.op(0), frees=("full",)))
    shard_states(edit, [Shard("wte", shape, "f32", gradient)])
    new, origins = edit.applied(mesh=[("fsdp", Size.of(2))])
    verify(new)
    sizes = {s.name: s.nbytes.constant for s in new.storages if s.nbytes.is_constant}
    assert (sizes["wte"], sizes["wte.m"], sizes["root"], sizes["wte.step"]) == (200, 400, 400, 4)
    assert origins == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    ops = [op for _, op in new.ops()]
    assert ops[-1].operands == ("wte", "g.shard", "root")
    assert next(op for op in ops if "norm" in op.opcode).operands == ("g.shard",)
    assert (mesh_text(new), ranks(new)) == ("fsdp 2", Size.of(2))
    assert not check_axis(new, "tensor-parallel", 1)
    with pytest.raises(UsageError, match="this axis already"):
        check_axis(new, "fsdp", 2)
    assert [s.name for s in gradients_of(edit.flow).values()] == ["g"]


def test_an_operator_that_looks_at_the_whole_matrix_is_inconclusive() -> None:
    text = TEXT.replace("%root: f64[10, 10] in $root = aten._foreach_sqrt(%m)", "%root: f64[10, 10] in $root = aten.mm(%m, %m)")
    edit = Edit(Flow(unroll(parse(text))))
    with pytest.raises(InconclusiveError, match="element by element") as error:
        shard_states(edit, [Shard("wte", (Size.of(5), Size.of(10)), "f32")])
    assert "aten.mm" in error.value.where
