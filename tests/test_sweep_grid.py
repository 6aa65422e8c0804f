"""A grid evaluated at once against the program walked with numbers at each point."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memir.analysis.inventory import round_size, rounded, rounded_peak
from memir.analysis.liveness import timeline
from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.size import Size, ceil_div
from memir.ir.unroll import unroll
from memir.recipe import Recipe
from memir.report import build_report
from memir.sweep.grid import Grid
from memir.sweep.rounding import rounded as rounded_size
from memir.sweep.rounding import timelines, with_sizes
from tests.programs import B, S, points, programs, step

SIMPLE = st.builds(
    lambda number, size: size * number,
    st.integers(1, 5000),
    st.sampled_from([Size.of(1), B, S, B * S, B * S * S, B * S - B, ceil_div(S, 64), B * ceil_div(S, 128)]),
)  # as those of real programs: comparing points with many generators takes long


def walked(program: Program, env: dict[str, int], rounding: Callable[[int], int] | None) -> tuple[int, int, int, int]:
    """Requested and allocated bytes at the peak, and between steps."""
    line = timeline(program)
    numbers = line.evaluate(env)
    nbytes = {storage.name: storage.nbytes.evaluate(env) for storage in program.storages}
    steady = [storage.name for storage in program.storages if storage.live_in and storage.device == "gpu"]
    peak = rounded_peak(line, nbytes, steady, env, rounding)
    return numbers.peak, peak, numbers.start, sum(rounded(nbytes[name], rounding) for name in steady)


@given(programs(max_ops=8, size=SIMPLE), st.data())
@settings(max_examples=50)
def test_every_cell_is_what_a_walk_there_says(program: Program, data: st.DataObject) -> None:
    places = data.draw(st.lists(points(program), min_size=1, max_size=4))
    cells = [(batch, seq) for batch in sorted({p["B"] for p in places}) for seq in sorted({p["S"] for p in places})]
    for rounding in (round_size, None):
        numbers = Grid(program, rounds=rounding is not None).numbers(cells)
        for (batch, seq), found in zip(cells, numbers, strict=True):
            expected = walked(program, {"B": batch, "S": seq}, rounding)
            assert (found.requested, found.allocated, found.steady_requested, found.steady_allocated) == expected


@given(programs(max_ops=3))
@settings(max_examples=20)
def test_all_kinds_of_sizes(program: Program) -> None:
    cells = [(batch, seq) for batch in (2, 7, 16) for seq in (64, 100, 128)]
    for (batch, seq), found in zip(cells, Grid(program).numbers(cells), strict=True):
        assert (found.requested, found.allocated) == walked(program, {"B": batch, "S": seq}, round_size)[:2]


def test_a_grid_that_is_cut_into_boxes_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [(batch, seq) for batch in (1, 2, 3, 50, 400) for seq in (1, 2, 17, 18, 64, 500, 1024)]
    whole = Grid(step()).numbers(cells)
    monkeypatch.setattr("memir.sweep.grid.FEW", 1)
    grid = Grid(step())
    assert grid.numbers(cells) == whole
    assert len(list(grid._parts(cells, None))) > 1


def test_the_place_is_that_of_the_report() -> None:
    numbers = Grid(step()).numbers([(1, 17), (2, 500)])
    assert [(n.place.phase, n.place.opcode, n.place.source) for n in numbers] == [
        ("optimizer", "aten._foreach_sqrt", ""),
        ("backward", "aten._log_softmax_backward_data", "model.py:31"),
    ]


def test_the_rounded_program_asks_for_what_the_allocator_gives() -> None:
    at = {"B": 3, "S": 17}
    program = with_sizes(step(), rounded_size)
    assert [s.nbytes.evaluate(at) for s in program.storages] == [round_size(s.nbytes.evaluate(at)) for s in step().storages]
    assert timeline(program).evaluate(at).peak == build_report(step(), at, Recipe()).peak.allocated


def test_one_walk_gives_the_timelines_of_both() -> None:
    for program in (step(), parse(LAYERS)):
        fixed = {"L": 5} if "L" in program.dims else {}
        for found, single in zip(timelines(program, fixed), (program, with_sizes(program, rounded_size)), strict=True):
            expected = timeline(single).bind(fixed)
            for at in ({"B": 1, "S": 1}, {"B": 3, "S": 100}):
                assert found.evaluate(at) == expected.evaluate(at)
            assert [step.op.path for step in found.steps] == [step.op.path for step in expected.steps]


LAYERS = """memir 1
program @layers
dim B, S, L
storage $w[L] : 1000 parameter live_in live_out
storage $h[-1] : 10*B*S activation
storage $h[L] : 10*B*S activation
value %w[L]: f32[250] in $w[L]
phase forward
  %h[-1]: u8[B, S, 10] in $h[-1] = aten.embedding()
  repeat i < L
    %h[i]: u8[B, S, 10] in $h[i] = aten.mm(%h[i-1], %w[i]) scratch 100*B
  memir.free() frees $h[-1]
  repeat i < L
    memir.free() frees $h[i]
"""


def test_a_repeat_is_rounded_in_its_body() -> None:
    program = with_sizes(parse(LAYERS), rounded_size)
    assert timeline(program).evaluate({"B": 3, "S": 7, "L": 3}).peak == 3 * 1024 + 4 * 512 + 512


def test_a_symbol_without_a_value_is_an_error() -> None:
    with pytest.raises(UsageError, match="no value is given for the symbol L"):
        Grid(parse(LAYERS))


def test_layers_that_are_folded_are_counted() -> None:
    folded = parse(LAYERS)
    cells = [(batch, seq) for batch in (1, 3, 64) for seq in (1, 7, 2048)]
    for layers in (1, 3, 40):
        grid = Grid(folded, fixed={"L": layers})
        for (batch, seq), found in zip(cells, grid.numbers(cells), strict=True):
            assert (found.requested, found.allocated) == walked(
                unroll(folded, {"L": layers}), {"B": batch, "S": seq}, round_size
            )[:2]
