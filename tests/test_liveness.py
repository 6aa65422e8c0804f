"""Liveness against numbers worked by hand, and against a recount of all live storages at every point."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir.analysis.liveness import live_ranges, timeline, walk
from memir.errors import InconclusiveError, UsageError, VerifyError
from memir.ir.core import Kind, Op, Phase, Program, Repeat, Storage, Value
from memir.ir.parser import parse
from memir.ir.size import Size
from memir.passes.lifetimes import Lifetimes
from tests.programs import points, programs, step

BS = Size.of("B") * Size.of("S")
RESIDENT = BS * 8 + 3000  # ids, w, m


def recount(program: Program, env: dict[str, int]) -> tuple[int, list[int], list[int]]:
    """Live bytes at each point the slow way: sum over all storages that are alive there."""
    storages = {s.name: s for s in program.storages}
    alive = {s.name for s in program.storages if s.live_in}

    def total() -> int:
        return sum(storages[name].nbytes.evaluate(env) for name in alive if storages[name].device == "gpu")

    start, running, after = total(), [], []
    for _, op in program.ops():
        alive |= {value.storage for value in op.results}
        running.append(total() + op.scratch.evaluate(env))
        alive -= set(op.frees)
        after.append(total())
    return start, running, after


def test_every_point_of_a_step_worked_by_hand() -> None:
    line = timeline(step())
    assert line.size(line.start) is RESIDENT
    assert [line.size(p) for p in line.running] == [
        RESIDENT + BS * 16,  # t
        RESIDENT + BS * 80,  # t, h
        RESIDENT + BS * 464 + 4096,  # h, logits, scratch
        RESIDENT + BS * 864,  # h, logits, dlogits
        RESIDENT + BS * 528,  # h, dlogits, dh
        RESIDENT + BS * 128 + 1000,  # h, dh, g
        RESIDENT + 31000,  # g, root
        RESIDENT + 31000,
        RESIDENT + 1000,
    ]
    assert [line.size(p) for p in line.after] == [
        RESIDENT + BS * 16,
        RESIDENT + BS * 64,
        RESIDENT + BS * 464,
        RESIDENT + BS * 464,
        RESIDENT + BS * 128,
        RESIDENT + 1000,
        RESIDENT + 31000,
        RESIDENT + 1000,
        RESIDENT,
    ]
    numbers = line.evaluate({"B": 2, "S": 10})
    assert numbers.start == 3160
    assert numbers.running[3] == 3160 + 864 * 20
    assert numbers.peak == 3160 + 31000  # the square root, at so small a batch
    assert line.evaluate({"B": 10, "S": 10}).peak == 3000 + 872 * 100


def test_points_that_are_equal_are_kept_once() -> None:
    line = timeline(step())
    assert len(set(line.points)) == len(line.points)
    assert line.running[6] == line.running[7] == line.after[6]
    assert line.after[8] == line.start


def test_live_ranges_worked_by_hand() -> None:
    ranges = live_ranges(step())
    h, logits, root, w, g = (ranges[name] for name in ("h", "logits", "root", "w", "g"))
    assert (h.made, h.freed, h.last_use, h.saved, h.dropped) == (1, 5, 5, 1, 1)
    assert (logits.made, logits.freed, logits.last_use, logits.saved, logits.dropped) == (2, 3, 3, 2, None)
    assert (root.made, root.freed, root.last_use) == (6, 7, 6)
    assert (w.made, w.freed, w.last_use) == (None, None, 4)
    assert (g.made, g.freed, g.last_use) == (5, 8, 6)
    assert [h.alive_at(i) for i in range(7)] == [False, True, True, True, True, True, False]
    assert all(w.alive_at(i) for i in range(9))


@given(st.data())
def test_the_timeline_is_the_recount_of_all_live_storages(data: st.DataObject) -> None:
    program = data.draw(programs())
    env = data.draw(points(program))
    start, running, after = recount(program, env)
    line = timeline(program)
    numbers = line.evaluate(env)
    assert (numbers.start, list(numbers.running), list(numbers.after)) == (start, running, after)
    assert [line.size(p).evaluate(env) for p in line.running] == running


@given(programs())
def test_live_ranges_say_who_is_alive_at_each_operator(program: Program) -> None:
    alive = {s.name for s in program.storages if s.live_in}
    ranges = live_ranges(program)
    for index, (_, op) in enumerate(program.ops()):
        alive |= {value.storage for value in op.results}
        assert {name for name, live in ranges.items() if live.alive_at(index)} == alive
        alive -= set(op.frees)


def test_an_alias_and_an_in_place_write_allocate_nothing() -> None:
    program = parse("""memir 1
program @p
storage $a : 100 temporary
phase forward
  %a: u8[100] in $a = test.make()
  %b: u8[50] in $a = test.view(%a)
  %c: u8[100] in $a = test.add_(%b) frees $a
""")
    assert timeline(program).evaluate({}).running == (100, 100, 100)
    assert [step.allocates for step in walk(program)] == [("a",), (), ()]


def test_host_storages_count_on_the_host_only() -> None:
    program = parse("""memir 1
program @p
storage $a : 100 temporary
storage $c : 7 temporary on host
phase forward
  %a: u8[100] in $a = test.make()
  %c: u8[7] in $c = test.offload(%a) frees $a
  memir.free() frees $c
""")
    assert timeline(program).evaluate({}).running == (100, 100, 0)
    assert timeline(program, "host").evaluate({}).running == (0, 7, 7)


def value(name: str, storage: str) -> Value:
    return Value(name, "u8", (), (), Size.of(0), storage)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((Op("a", results=(value("x", "s"),), frees=("s",)), Op("b", frees=("s",))), r"\$s is freed while it is not alive"),
        (
            (Op("a", results=(value("x", "s"),), frees=("s",)), Op("b", results=(value("y", "s"),), source="m.py:3")),
            r"\$s is allocated again after it was freed\n.*operator 1: b m.py:3",
        ),
        ((Op("a", results=(value("x", "nobody"),)),), r"\$nobody is not declared"),
        ((Op("a", frees=("s",)),), r"\$s is freed while it is not alive"),
    ],
)
def test_a_broken_program_is_an_error_that_names_the_place(ops: tuple[Op, ...], message: str) -> None:
    program = Program("p", (), (), (), (Storage("s", Size.of(8), Kind.TEMPORARY),), (), (Phase("forward", ops),))
    with pytest.raises(VerifyError, match=message):
        timeline(program)


def test_an_unknown_operand_is_an_error() -> None:
    program = Program("p", (), (), (), (), (), (Phase("forward", (Op("a", operands=("x",)),)),))
    with pytest.raises(VerifyError, match="%x is used before it is made"):
        live_ranges(program)


LAYERS = """memir 1
program @layers
dim B, L
storage $x : 8*B input live_in live_out
storage $w[{L}] : 100 parameter live_in live_out
storage $h[{L}] : 64*B activation
value %x: u8[8*B] in $x
value %w[{L}]: u8[100] in $w[{L}]
phase forward
  repeat i < {L}
    %h: u8[64*B] in $h[i] = aten.mm(%x, %w[i]) at @layers.{{i}}
phase backward
  repeat i < {L}
    memir.free() frees $h[L-1-i]
"""


def test_repeats_with_a_number_are_unrolled() -> None:
    text = LAYERS.format(L=3).replace("[3]", "[:3]").replace("L-1-i", "2-i")
    numbers = timeline(parse(text)).evaluate({"B": 2, "L": 1})
    assert numbers.start == 16 + 300
    assert numbers.running == (444, 572, 700, 700, 572, 444)


def test_numbers_need_every_symbol_and_whole_bytes() -> None:
    line = timeline(step())
    with pytest.raises(UsageError, match="symbol S"):
        line.evaluate({"B": 1})
    shard = parse("memir 1\nprogram @p\ndim B, t\nstorage $a : B/t temporary live_in live_out\n")
    assert timeline(shard).evaluate({"B": 6, "t": 3}).start == 2
    with pytest.raises(InconclusiveError, match="not a whole number of bytes at B=7, t=3"):
        timeline(shard).evaluate({"B": 7, "t": 3})


def test_lifetimes_adds_the_frees_that_lack_and_leaves_observed_ones() -> None:
    program = parse("""memir 1
program @p
storage $a : 10 temporary
storage $b : 20 temporary
storage $c : 40 temporary live_in
storage $k : 5 temporary live_in
phase forward
  %a: u8[10] in $a = test.make()
  %b: u8[20] in $b = test.use(%a)
phase backward
  %x: u8[40] in $c = test.into(%b)
  test.last()  frees $k
""")
    found = Lifetimes().run(program)
    assert [op.frees for _, op in found.ops()] == [(), ("a",), ("b", "c"), ("k",)]
    assert Lifetimes().run(found) is found
    observed = step()
    assert Lifetimes().run(observed) is observed


def test_lifetimes_of_a_storage_that_is_never_used() -> None:
    program = parse("memir 1\nprogram @p\nstorage $c : 40 temporary live_in\nphase forward\n  test.op()\n")
    assert [op.frees for _, op in Lifetimes().run(program).ops()] == [("c",)]
    empty = parse("memir 1\nprogram @p\nstorage $c : 40 temporary live_in\n")
    assert Lifetimes().run(empty) is empty


@given(programs())
def test_lifetimes_never_raises_a_point_and_leaves_only_what_is_live_out(program: Program) -> None:
    found = Lifetimes().run(program)
    before, after = timeline(program).evaluate({"B": 64, "S": 64}), timeline(found).evaluate({"B": 64, "S": 64})
    assert all(a <= b for a, b in zip(after.running, before.running, strict=True))
    if any(phase.ops for phase in program.phases):
        ranges = live_ranges(found).values()
        assert all(live.freed is not None or live.storage.live_out for live in ranges if live.made is not None)


def test_lifetimes_unrolls_only_when_it_has_to() -> None:
    text = LAYERS.format(L=3).replace("[3]", "[:3]").replace("L-1-i", "2-i")
    program = parse(text)
    assert Lifetimes().run(program) is program
    without = replace(program, phases=(program.phases[0],))
    assert isinstance(without.phases[0].ops[0], Repeat)
    assert [op.frees for _, op in Lifetimes().run(without).ops()] == [("h[0]",), ("h[1]",), ("h[2]",)]
