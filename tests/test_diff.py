"""Two programs compared: what is which, what changed at the peak, whether all adds up. By hand, and on random programs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memir.diff.compare import Difference, compare
from memir.diff.lines import compare_sources
from memir.diff.orders import leading, powers, product_text, within
from memir.diff.side import Moment, Side
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.size import Size, ceil_div, max_of
from tests.programs import STEP, programs

POINT = {"B": 4, "S": 64}


def difference(base: str, head: str, point: dict[str, int] | None = None) -> Difference:
    return compare(Side("base", parse(base), point or POINT), Side("head", parse(head), point or POINT))


def test_the_same_program_is_no_difference() -> None:
    found = difference(STEP, STEP)
    assert (found.nbytes, found.changes, found.elsewhere, found.moved, found.orders) == (0, (), 0, False, ())
    assert found.delta == Size.of(0)


def test_a_storage_that_grew_is_told_with_its_line_and_formula() -> None:
    found = difference(STEP, STEP.replace("$logits : 400*B*S", "$logits : 800*B*S"))
    (change,) = found.changes
    assert (change.what, change.op, change.module, change.source) == ("grew", "aten.mm", "head", "model.py:30")
    assert (change.before, change.after) == (400 * 4 * 64, 800 * 4 * 64)
    assert change.delta.text(("B", "S")) == "400*B*S"
    assert found.delta == change.delta
    assert not found.moved


def test_an_inserted_operator_is_new_and_those_around_it_stay_who_they_are() -> None:
    wide = STEP.replace("storage $root", "storage $wide : 200*B*S activation\nstorage $root").replace(
        "  %logits:",
        "  %wide: f32[B, S, 50] in $wide = aten.mm(%h, %w) saves $wide at @head from model.py:29\n  %logits:",
    )
    wide = wide.replace("frees $dh, $h at", "frees $dh, $h, $wide at")
    found = difference(STEP, wide)
    assert [(c.what, c.source, c.nbytes) for c in found.changes] == [("appeared", "model.py:29", 200 * 4 * 64)]
    back = difference(wide, STEP)
    assert [(c.what, c.source, c.nbytes) for c in back.changes] == [("vanished", "model.py:29", -200 * 4 * 64)]


def test_a_storage_that_lives_longer_is_told_even_without_a_new_operator() -> None:
    longer = STEP.replace("frees $t at", "at").replace("frees $dh, $h at", "frees $dh, $h, $t at")
    found = difference(STEP, longer)
    assert [(c.what, c.kind, c.nbytes) for c in found.changes] == [("lives longer", "temporary", 16 * 4 * 64)]
    assert [c.what for c in difference(longer, STEP).changes] == ["dies earlier"]


def test_a_peak_that_moved_is_compared_in_one_place() -> None:
    found = difference(STEP, STEP.replace("$root : 30000", "$root : 900000"))
    assert found.moved
    assert found.spot_after.phase == "optimizer"
    (change,) = found.changes
    assert (change.what, change.nbytes) == ("grew", 870_000)
    assert found.elsewhere == found.nbytes - 870_000 < 0  # the old peak lay above the optimizer's place


def test_a_renamed_module_is_the_same_module() -> None:
    assert difference(STEP, STEP.replace("@head", "@lm_head").replace("@layers.0.up", "@layers.0.fc")).changes == ()


def test_a_new_order_is_told_in_words() -> None:
    found = difference(STEP, STEP.replace("$h : 64*B*S ", "$h : 64*B*S + 2*B*S^2 "))
    (order,) = found.orders
    assert order.words == "the peak gained a B*S**2 term: 2*B*S**2 bytes"
    assert order.nbytes == 2 * 4 * 64 * 64
    (lost,) = difference(STEP.replace("$h : 64*B*S ", "$h : 64*B*S + 2*B*S^2 "), STEP).orders
    assert lost.words.startswith("the peak lost a B*S**2 term")
    assert difference(STEP, STEP.replace("$h : 64*B*S ", "$h : 65*B*S ")).orders == ()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (Size.of("B") * Size.of("S") * 3 + 7, ["B*S"]),
        (Size.of("B") + Size.of("S"), ["B", "S"]),
        (Size.of("B") * Size.of("S") + Size.of("S") * Size.of("S"), ["B*S", "S**2"]),
        (ceil_div(Size.of("S"), 64) * Size.of("B"), ["B*S"]),
        (max_of(Size.of("S"), Size.of("B")) * 4, ["B*S"]),
        (Size.of(5), []),
    ],
)
def test_orders_of_growth(size: Size, words: list[str]) -> None:
    assert [product_text(found) for found in leading([size])] == words


def test_one_order_within_another() -> None:
    small, large = (powers(size.terms[0][0]) for size in (Size.of("S"), Size.of("B") * Size.of("S")))
    assert within(small, large)
    assert not within(large, small)


@settings(max_examples=20)
@given(programs(max_ops=8), programs(max_ops=8), st.integers(2, 5), st.integers(64, 100))
def test_changes_always_add_up(a: Program, b: Program, batch: int, seq: int) -> None:
    sides = [Side(name, program, {"B": batch, "S": seq}) for name, program in (("a", a), ("b", b))]
    found = compare(sides[0], sides[1])  # it raises where they do not add up
    assert sum(change.nbytes for change in found.changes) + found.elsewhere == found.after - found.before
    assert found.after == sides[1].formula.evaluate(sides[1].point)[0]


@settings(max_examples=20)
@given(programs(max_ops=8))
def test_the_storages_alive_are_the_live_bytes(program: Program) -> None:
    side = Side("a", program, {"B": 3, "S": 64})
    for position in range(len(side.line.steps)):
        for moment in (Moment(position), Moment(position, after=True)):
            total = sum((live.storage.nbytes for live in side.alive(moment).values()), Size.of(0))
            assert total + side.scratch(moment) == side.live_bytes(moment)


def test_blame_goes_to_the_line_that_changed_the_size_not_to_a_new_name() -> None:
    before = "def f(x, w):\n    t = embed(x)\n    h = t @ w\n    logits = h @ w\n    return logits\n"
    after = before.replace("t = embed(x)\n    h = t @ w", "first = embed(x)\n    h = first @ w").replace(
        "h @ w\n    r", "wide(h @ w)\n    r"
    )
    numbered = STEP.replace("model.py:10", "m.py:2").replace("model.py:20", "m.py:3").replace("model.py:30", "m.py:4")
    sources = compare_sources([("m.py", before, "m.py", after)])
    head = numbered.replace("$logits : 400*B*S", "$logits : 800*B*S")
    found = compare(Side("base", parse(numbered), POINT), Side("head", parse(head), POINT), sources)
    assert (found.blames[0].line, found.blames[0].text) == (4, "logits = wide(h @ w)")
    assert found.blames[0].weight > 0.9
    assert found.blames[0].nbytes == found.nbytes
