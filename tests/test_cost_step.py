"""Operators in parts, tasks on streams, and the step that they make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memir
from memir.analysis.cost.device import device
from memir.analysis.cost.operators import Spent, spent
from memir.analysis.cost.overlap import SLOWDOWN, Task, simulate
from memir.analysis.cost.parts import Parts, parts
from memir.analysis.cost.step import Exchange, bubble_of, microbatch_tasks, step_time
from memir.analysis.flops import total_flops, work_of
from memir.analysis.traffic import written
from memir.hardware import find_card
from memir.ir.parser import parse

TASKS = st.lists(st.tuples(st.sampled_from(("", "gather", "reduce")), st.floats(0, 10), st.integers(0, 5)), max_size=12)


@given(TASKS)
def test_streams_are_bounded_by_their_work(made: list[tuple[str, float, int]]) -> None:
    tasks = [Task(s, t, (i - 1 - back,) if i - 1 - back >= 0 else ()) for i, (s, t, back) in enumerate(made)]
    ran = simulate(tasks)
    sums = {name: sum(t.seconds for t in tasks if t.stream == name) for name in ("", "gather", "reduce")}
    assert max(sums.values()) <= ran.seconds + 1e-9
    assert ran.seconds <= SLOWDOWN * sums[""] + sums["gather"] + sums["reduce"] + 1e-9
    assert sums[""] - 1e-9 <= ran.computing <= SLOWDOWN * sums[""] + 1e-9
    assert -1e-9 <= ran.exposed <= ran.communicating + 1e-9


def test_computing_is_slower_while_something_is_communicated() -> None:
    ran = simulate([Task("gather", 1.0), Task("", 2.0)])
    assert ran.seconds == pytest.approx(1.0 + (2.0 - 1.0 / SLOWDOWN))
    assert ran.exposed == 0
    ran = simulate([Task("gather", 1.0), Task("", 2.0, (0,))])
    assert (ran.seconds, ran.exposed) == (3.0, 1.0)
    with pytest.raises(ValueError, match="later"):
        simulate([Task("", 1.0, (0,))])


def flat(seconds: float) -> Spent:
    return Spent(product=seconds)


PARTS = Parts(4, flat(0.1), flat(4.0), flat(0.5), flat(1.0), flat(8.0), flat(0.1), flat(0.2))


def test_a_step_alone_is_the_sum_of_its_parts() -> None:
    time = step_time(PARTS, Exchange())
    assert time.seconds == pytest.approx(13.9)
    assert (time.exposed, time.bubble, time.limit) == (0, 0, "compute")
    assert step_time(PARTS, Exchange(), accumulate=3).seconds == pytest.approx(3 * 13.7 + 0.2)


def test_what_is_gathered_early_is_hidden_and_what_is_needed_at_once_is_not() -> None:
    hidden = step_time(PARTS, Exchange(gather_layer=0.5, reduce_layer=0.5))
    blocking = step_time(PARTS, Exchange(inside_forward=2.0, inside_backward=2.0))
    assert hidden.exposed < 0.1 * hidden.communicating + 1.5
    assert blocking.exposed == pytest.approx(4.0)
    assert blocking.seconds == pytest.approx(13.9 + 4.0)
    slow = step_time(PARTS, Exchange(gather_layer=5.0))
    assert slow.limit == "communication"
    assert slow.seconds > 8 * 5.0


def test_replicated_gradients_are_reduced_once_in_a_step() -> None:
    exchange = Exchange(again=False, reduce_layer=10.0)
    once, each = (step_time(PARTS, exchange, accumulate=4, every=every) for every in (False, True))
    assert once.seconds < each.seconds - 50


@pytest.mark.parametrize(
    "exchange", [Exchange(0.2, 0.5, True, 0.3, 0.4), Exchange(inside_forward=3.2), Exchange(4.0, 1.0, False)]
)
def test_many_layers_are_a_few_and_more_of_the_same(exchange: Exchange) -> None:
    many = Parts(32, flat(0.1), flat(16.0), flat(0.5), flat(1.0), flat(32.0), flat(0.1), flat(0.2))
    whole = simulate(microbatch_tasks(many, exchange, reduce=True))
    assert step_time(many, exchange).seconds == pytest.approx(whole.seconds + 0.2, rel=1e-3)


def test_bubbles() -> None:
    assert bubble_of(4) == 3
    assert bubble_of(4, chunks=2) == 1.5
    assert bubble_of(4, zero_bubble=True) == 1
    assert step_time(PARTS, Exchange(), accumulate=2, bubble=bubble_of(2)).bubble == pytest.approx(13.7)


def test_parts_are_the_whole_step() -> None:
    traced = memir.trace("examples/gpt.py", sets={"n_layer": 4}, batch=4, seq=128)
    card = find_card("a100-80gb")
    assert card is not None
    env, works = {"B": 4, "S": 128}, work_of(traced.program)
    found = parts(works, env, device(card), 4)
    every = spent(works, env, device(card))
    assert found.forward.product == pytest.approx(every["forward"].product)
    assert found.backward.memory == pytest.approx(every["backward"].memory)
    assert found.optimizer.memory == pytest.approx(every["optimizer"].memory)
    assert min(found.layer_forward.product, found.layer_backward.product, found.after_forward.product) > 0
    assert found.layer_backward.product > 1.5 * found.layer_forward.product
    assert total_flops(works, env) == sum(w.times.evaluate(env) * w.flops.evaluate(env) for w in works)


@pytest.mark.parametrize(
    ("opcode", "count", "positions"),
    [
        ("aten.mm", 2, []),
        ("aten._foreach_mul_.Scalar", 3, [0, 1, 2]),
        ("aten._foreach_add_.List", 4, [0, 1]),
        ("aten._foreach_addcdiv_.ScalarList", 6, [0, 1]),
        ("aten._fused_adamw_", 10, [0, 1, 4, 5, 6, 7]),
    ],
)
def test_what_is_written_in_place(opcode: str, count: int, positions: list[int]) -> None:
    assert written(opcode, count) == positions


def test_a_view_of_a_family_moves_nothing() -> None:
    program = parse(
        """memir 1
program @views
dim L
storage $w[L] : 128 parameter live_in live_out
storage $x : 32 temporary
value %w[L]: bf16[8, 8] in $w[L]
phase forward
  repeat i < L
    %t[i]: bf16[8, 8] in $w[i] = aten.t(%w[i])
  %x: bf16[4, 4] in $x = aten.ones()
  memir.free() frees $x
"""
    )
    assert [work.op.opcode for work in work_of(program)] == ["aten.ones"]
