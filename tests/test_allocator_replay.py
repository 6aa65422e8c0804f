"""Programs played through the allocator: layouts worked by hand, order of requests, and agreement with the live bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir.allocator.player import Failure, Hole, Neighbour, PhasePeak, Place
from memir.allocator.replay import simulate
from memir.allocator.schedule import Kept, schedule
from memir.allocator.settings import Settings, parse_settings
from memir.analysis.inventory import round_size as round_512
from memir.analysis.inventory import rounded_points
from memir.analysis.liveness import flatten, timeline
from memir.api import program_of
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind
from memir.ir.parser import parse
from memir.recipe import Recipe
from tests import programs

M = 2**20
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"

STEP = """memir 1
program @step
dim B
domain B <= 8
storage $w : 12582912 parameter live_in live_out
storage $b : 1000 buffer live_in live_out
storage $ids : 8*B input live_in live_out
storage $count : 4 optimizer_state on host of $w live_in live_out
storage $m : 12582912 optimizer_state of $w live_in live_out
storage $h : 3145728*B activation
storage $d : 15728640 temporary
storage $g : 12582912 gradient of $w
value %w: u8[12582912] in $w
value %ids: i64[B] in $ids
value %m: u8[12582912] in $m
phase forward
  %h: u8[3145728*B] in $h = aten.mm(%w, %ids) scratch 2097152 at @up from model.py:3
phase backward
  %d: u8[15728640] in $d = aten.mm(%h) frees $h at @up from model.py:3
  %g: u8[12582912] in $g = aten.mm(%d) frees $d at @up from model.py:3
phase optimizer
  aten._foreach_norm(%g) from torch/nn/utils/clip_grad.py:9
  aten._foreach_mul_(%w) from torch/optim/adam.py:691
  aten._foreach_lerp_(%m, %g) from torch/optim/adam.py:704
  memir.free() frees $g at @zero_grad
"""
# Worked by hand, in MiB, a free block with a minus. $w, $b and $ids are alive first: segments [12] and small [1024 and 512
# bytes, the rest].
#   step 0  h: [3, -17]; its 2 of scratch come and go; d: [3, 15, -2]; h dies; g does not fit: [12]; d dies: [-20];
#           m is made: [12, -8]; g dies: [-12]. In all 12 + 2 + 20 + 12.
#   step 1  h: [12, 3, -5]; d fits nowhere: a segment of 16, of which 1 is not split off; h dies; g: [12]; d dies: [-16].
#   step 2  the same without a new segment.
SMALL = 1024 + 512


def test_a_step_worked_by_hand() -> None:
    found = simulate(parse(STEP), {"B": 1})
    assert (found.reserved_peak, found.reserved_end) == (62 * M, 62 * M)
    # while g is made: w, m, d, g, of which d has a block of 16 MiB
    assert (found.allocated_peak, found.rounded_peak) == (52 * M + SMALL, 51 * M + SMALL)
    assert found.allocated_end == 24 * M + SMALL
    # 62 MiB are reserved since d was made in step 1, and the most is allocated when g is made after it
    assert found.at_peak == Place(1, 2, "backward", "aten.mm", "up", "model.py:3")
    assert (found.allocated_at_peak, found.fragmentation) == (52 * M + SMALL, 10 * M - SMALL)
    assert found.phases == (
        PhasePeak("forward", (24 + 3 + 2) * M + SMALL, 62 * M),
        PhasePeak("backward", 52 * M + SMALL, 62 * M),
        PhasePeak("optimizer", 36 * M + SMALL, 62 * M),
    )
    assert found.holes == (
        Hole(8 * M, 20 * M, False, Neighbour("m", Kind.OPTIMIZER_STATE, 12 * M, None), None),
        Hole(2 * M - SMALL, 2 * M, True, Neighbour("ids", Kind.INPUT, 8, None), None),
    )
    assert (found.num_retries, found.failure, found.steps, found.settings) == (0, None, 3, Settings())


def test_the_first_step_alone_reserves_less() -> None:
    found = simulate(parse(STEP), {"B": 1}, steps=1)
    # at its peak there is no m yet: w, d, g
    assert (found.reserved_peak, found.allocated_peak) == (46 * M, 39 * M + SMALL)
    assert [phase.allocated - SMALL for phase in found.phases] == [17 * M, 39 * M, 36 * M]


def test_expandable_segments_need_less() -> None:
    found = simulate(parse(STEP), {"B": 1}, parse_settings("expandable_segments:True"))
    # step 1: w 12, h 3, free 5 and up, m somewhere: blocks are cut to size, so that the peak of 51 needs three granules
    assert found.reserved_peak == 2 * M + 60 * M
    assert found.allocated_peak == found.rounded_peak == 51 * M + SMALL


def test_the_state_is_made_where_the_optimizer_begins() -> None:
    moves = schedule(parse(STEP), {"B": 1}).moves
    assert [(move.op.source, move.first) for move in moves if move.first] == [("torch/optim/adam.py:691", ("m",))]


def test_without_code_of_torch_optim_the_state_is_made_where_its_phase_begins() -> None:
    moves = schedule(parse(STEP.replace("torch/optim/", "mine/")), {"B": 1}).moves
    assert [(move.op.opcode, move.first) for move in moves if move.first] == [("aten._foreach_norm", ("m",))]


def test_the_symbol_and_the_domain_are_the_programs() -> None:
    assert simulate(parse(STEP), {"B": 8}).allocated_peak == (12 + 12 + 24 + 15) * M + SMALL  # while d is made
    with pytest.raises(UsageError, match="no value is given for B"):
        simulate(parse(STEP), {})
    with pytest.raises(UsageError, match="B <= 8"):
        simulate(parse(STEP), {"B": 9})
    with pytest.raises(UsageError, match="0 steps"):
        simulate(parse(STEP), {"B": 1}, steps=0)
    with pytest.raises(InconclusiveError, match="cudaMallocAsync"):
        simulate(parse(STEP), {"B": 1}, parse_settings("backend:cudaMallocAsync"))


def test_out_of_memory_names_the_operator_and_the_storage() -> None:
    found = simulate(parse(STEP), {"B": 1}, capacity=55 * M, total=60 * M)
    # step 1 needs 16 MiB more than the 46 that are reserved; giving back the free segment of g leaves 55 - 34 MiB, enough
    # for d; then g does not fit any more
    assert isinstance(found.failure, Failure)
    assert found.failure.place == Place(1, 2, "backward", "aten.mm", "up", "model.py:3")
    assert found.failure.storage == "g"
    oom = found.failure.oom
    assert (oom.tried, oom.total, oom.reserved, oom.free) == (12 * M, 60 * M, (12 + 2 + 20 + 16) * M, 5 * M)
    assert oom.allocated == (12 + 12 + 16) * M + SMALL
    assert (found.reserved_peak, found.num_retries, found.phases) == (50 * M, 2, ())


def test_out_of_memory_before_the_first_step() -> None:
    found = simulate(parse(STEP), {"B": 1}, capacity=10 * M)
    assert found.failure is not None
    assert (found.failure.place, found.failure.storage) == (Place(0, -1, "setup"), "w")
    assert (found.reserved_peak, found.holes) == (0, ())


def test_out_of_memory_for_a_workspace() -> None:
    text = STEP.replace("scratch 2097152", "scratch 209715200")
    found = simulate(parse(text), {"B": 1}, capacity=100 * M)
    assert found.failure is not None
    assert (found.failure.place.phase, found.failure.storage, found.failure.oom.requested) == ("forward", None, 200 * M)


KEPT = """memir 1
program @kept
storage $w : 12582912 parameter live_in live_out
storage $old : 16777216 activation live_in
storage $new : 16777216 activation live_out
value %w: u8[12582912] in $w
phase forward
  %new: u8[16777216] in $new = aten.mm(%w)
  memir.free() frees $old at @outputs
"""


def test_what_a_step_leaves_the_next_one_frees() -> None:
    first, second = (simulate(parse(KEPT), {}, steps=steps) for steps in (1, 2))
    assert (first.allocated_peak, first.allocated_end, first.reserved_peak) == (28 * M, 28 * M, 28 * M)
    assert (second.allocated_peak, second.allocated_end, second.reserved_peak) == (44 * M, 28 * M, 44 * M)
    assert schedule(parse(KEPT), {}).heirs == {"new": "old"}
    assert simulate(parse(KEPT), {}, steps=9).reserved_peak == 44 * M


def test_what_a_step_expects_and_none_leaves_is_there_from_the_second_step_on() -> None:
    text = KEPT.replace("$old : 16777216", "$old : 14680064")
    assert schedule(parse(text), {}).heirs == {}
    first, second = (simulate(parse(text), {}, steps=steps) for steps in (1, 2))
    assert (first.allocated_peak, first.allocated_end) == (28 * M, 12 * M)
    # its 14 MiB take the free block of 16, of which 2 MiB are split off, and the 16 that are made a new one
    assert (second.allocated_peak, second.reserved_peak) == ((12 + 14 + 16) * M, (12 + 16 + 16) * M)


def test_a_stream_has_its_own_memory() -> None:
    text = (
        KEPT
        + """  %t: u8[16777216] in $t = aten.mm(%w){}
  memir.free() frees $t
"""
    )
    text = text.replace("value %w", "storage $t : 16777216 temporary\nvalue %w")
    # on its own stream $t cannot have the block of $old
    assert simulate(parse(text.format("")), {}).reserved_peak == 44 * M
    assert simulate(parse(text.format(" stream comm")), {}).reserved_peak == 60 * M


def test_what_libraries_keep_is_taken_at_the_first_product_of_a_phase() -> None:
    kept = (Kept(3 * M, "forward"), Kept(5 * M, "backward"), Kept(9 * M, "prefill"))
    moves = schedule(parse(STEP), {"B": 1}, kept).moves
    assert [(move.op.opcode, move.kept) for move in moves if move.kept] == [("aten.mm", (3 * M,)), ("aten.mm", (5 * M,))]
    plain, more = simulate(parse(STEP), {"B": 1}), simulate(parse(STEP), {"B": 1}, kept=kept)
    assert (more.rounded_peak - plain.rounded_peak, more.allocated_end - plain.allocated_end) == (8 * M, 8 * M)
    assert more.reserved_peak >= plain.reserved_peak


@given(st.data())
def test_the_rounded_peak_is_that_of_the_live_bytes(data: st.DataObject) -> None:
    """From the second step on exactly the storages that the analysis counts are alive."""
    program = data.draw(programs.programs())
    env = data.draw(programs.points(program))
    flat = flatten(program)
    nbytes = {s.name: s.nbytes.evaluate(env) for s in flat.storages}
    steady = [s.name for s in flat.storages if s.live_in and s.device == "gpu"]
    expected = max(rounded_points(timeline(flat), nbytes, steady, env, round_512))
    for text in ("", "expandable_segments:True"):
        found = simulate(program, env, parse_settings(text), steps=2)
        assert found.rounded_peak == expected
        assert found.rounded_peak <= found.allocated_peak <= found.reserved_peak
        assert found.allocated_at_peak <= found.allocated_peak
        assert found.failure is None
        if text:
            assert found.rounded_peak == found.allocated_peak


@given(st.data())
def test_what_fits_exactly_fits(data: st.DataObject) -> None:
    """With as much memory as was reserved nothing changes; with less it is given back first, or it fails."""
    program = data.draw(programs.programs())
    env = data.draw(programs.points(program))
    free = simulate(program, env, steps=2)
    exact = simulate(program, env, capacity=free.reserved_peak, steps=2)
    assert (exact.reserved_peak, exact.allocated_peak, exact.num_retries) == (free.reserved_peak, free.allocated_peak, 0)
    if free.reserved_peak:
        less = simulate(program, env, capacity=free.reserved_peak - 1, steps=2)
        assert less.num_retries
        assert less.reserved_peak < free.reserved_peak


FOREACH = """memir 1
program @foreach
dim L
storage $emb : 1000 parameter live_in live_out
storage $h.*.a[L] : 2000 parameter live_in live_out
storage $h.*.b[L] : 3000 parameter live_in live_out
storage $h.*.a.m[L] : 2000 optimizer_state of $h.*.a[L] live_in live_out
storage $h.*.b.m[L] : 3000 optimizer_state of $h.*.b[L] live_in live_out
storage $ra[L] : 4000 temporary
storage $rb[L] : 6000 temporary
value %h.*.a.m[L]: u8[2000] in $h.*.a.m[L]
value %h.*.b.m[L]: u8[3000] in $h.*.b.m[L]
phase optimizer
  %ra[:L]: u8[4000] in $ra[:L], %rb[:L]: u8[6000] in $rb[:L] = aten._foreach_sqrt(%h.*.a.m[:L], %h.*.b.m[:L])
  memir.free() frees $ra[:L], $rb[:L]
"""


def test_layers_that_were_folded_are_allocated_layer_by_layer() -> None:
    plan = schedule(parse(FOREACH), {"L": 3})
    assert [plan.sizes[name] for name in plan.before] == [1000] + [2000, 3000] * 3
    move = plan.moves[0]
    assert [plan.sizes[name] for name in move.first] == [2000, 3000] * 3
    assert [plan.sizes[name] for name in move.allocates] == [4000, 6000] * 3


def test_a_folded_model_makes_the_requests_of_the_full_one() -> None:
    sets = {"n_layer": 9, "n_embd": 32, "n_head": 4, "vocab_size": 96}
    plans = []
    for fold in (True, False):
        traced = program_of(str(EXAMPLE), Recipe(clip=1.0), batch=2, seq=24, sets=sets, fold=fold, cache=False)
        assert ("L" in traced.env) == fold
        plan = schedule(traced.program, traced.env)
        sizes = plan.sizes
        requests = [
            (move.phase, move.op.opcode, [sizes[n] for n in move.first], [sizes[n] for n in move.allocates], move.scratch)
            for move in plan.moves
        ]
        plans.append(([sizes[name] for name in plan.before], requests))
    assert plans[0] == plans[1]
