"""Which program a point gets, how often is traced for it, and what is said where there is none; traces are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memir.errors import InconclusiveError, UsageError
from memir.hardware import Gpu
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.recipe import Recipe
from memir.sweep.pool import Pool, Step
from memir.sweep.run import solve, sweep
from tests.programs import step

MANY = [(batch, seq) for batch in (1, 2, 4) for seq in (16, 32, 64, 128)]


class Traces:
    """Traces that are counted. `answer` gives the step at a point, or raises."""

    def __init__(self, answer: Callable[[int, int], Step]) -> None:
        self.answer, self.made = answer, list[tuple[int, int | None]]()

    def __call__(self, batch: int, seq: int | None) -> Step:
        self.made.append((batch, seq))
        return replace(self.answer(batch, seq or 64), seq=seq or 64, name="tiny")

    def pool(self, max_traces: int = 8) -> Pool:
        return Pool(self, rounds=True, max_traces=max_traces)


def valid(*domain: str) -> Program:
    return replace(step(), domain=domain)


def tiny(nbytes: int, *domain: str) -> Program:
    text = "".join(f"domain {condition}\n" for condition in domain)
    return parse(f"memir 1\nprogram @tiny\ndim B, S\n{text}storage $x : {nbytes}*B*S input live_in live_out\n")


def test_one_trace_does_where_its_program_holds_everywhere() -> None:
    traces = Traces(lambda b, s: Step(valid("S <= 1024")))
    found, reasons = traces.pool().assign(MANY)
    assert (set(found), reasons) == (set(MANY), {})
    assert traces.made == [(1, 64)]  # the smallest batch, the middle of its lengths


def test_the_program_of_one_sequence_and_the_general_one_come_from_one_trace() -> None:
    traces = Traces(lambda b, s: Step(valid("B == 1"), valid("B >= 2")))
    found, _ = traces.pool().assign(MANY)
    assert len(traces.made) == 1
    assert {holding.program.domain: {b for (b, _), h in found.items() if h is holding} for holding in set(found.values())} == {
        ("B == 1",): {1},
        ("B >= 2",): {2, 4},
    }


def test_points_outside_are_traced_again() -> None:
    traces = Traces(lambda b, s: Step(valid("S <= 32")) if s <= 32 else Step(valid("S >= 33")))
    found, reasons = traces.pool().assign(MANY)
    assert (len(found), reasons, traces.made) == (len(MANY), {}, [(1, 64), (1, 32)])


def test_the_models_limit_is_told_without_a_trace() -> None:
    traces = Traces(lambda b, s: Step(valid(), max_seq=64))
    found, reasons = traces.pool().assign(MANY)
    assert traces.made == [(1, 64)]
    assert {seq for _, seq in found} == {16, 32, 64}
    assert set(reasons.values()) == {"tiny accepts sequences of at most 64 tokens"}


def refused(batch: int, seq: int) -> Step:
    if seq > 20:
        raise UsageError(f"forward() of Tiny fails on ids of shape [B, S={seq}]", where="model.py:9   assert t < 21")
    return Step(valid())


def test_a_length_that_is_refused_refuses_the_longer_ones() -> None:
    traces = Traces(refused)
    found, reasons = traces.pool().assign(MANY)
    assert traces.made == [(1, 64), (1, 32), (1, 16)]
    assert {seq for _, seq in found} == {16}
    assert set(reasons) == {point for point in MANY if point[1] > 20}
    assert reasons[4, 128] == "S=32 is refused: forward() of Tiny fails on ids of shape [B, S=32]; model.py:9   assert t < 21"


def test_what_fails_at_every_length_is_the_users_to_mend() -> None:
    with pytest.raises(UsageError, match="fails on ids"):
        Traces(refused).pool().assign([(1, 32), (1, 64)])


def test_a_model_that_cannot_be_followed_at_all() -> None:
    def opaque(batch: int, seq: int) -> Step:
        raise InconclusiveError("an operator without a fake implementation")

    with pytest.raises(InconclusiveError):
        Traces(opaque).pool().assign(MANY)


def test_a_point_that_cannot_be_followed_is_told_and_the_others_are_known() -> None:
    def some(batch: int, seq: int) -> Step:
        if batch == 4:
            raise InconclusiveError("decides by data", where="model.py:7")
        return Step(valid("B <= 2"))

    found, reasons = Traces(some).pool().assign([(2, 64), (4, 64)])
    assert (list(found), reasons) == ([(2, 64)], {(4, 64): "decides by data; model.py:7"})


def test_traces_are_limited() -> None:
    traces = Traces(lambda b, s: Step(valid(f"B == {b}", f"S == {s}"), inconclusive=("no formula",)))
    found, reasons = traces.pool(max_traces=3).assign(MANY)
    assert (len(traces.made), len(found), len(reasons)) == (3, 3, len(MANY) - 3)
    assert reasons[4, 128] == "the program holds for B == 1 only, and no more is traced"


def test_a_condition_that_cannot_be_read_holds_where_it_was_traced() -> None:
    found, reasons = Traces(lambda b, s: Step(valid("S is prime"))).pool(max_traces=1).assign(MANY)
    assert list(found) == [(1, 64)]
    assert reasons[1, 16] == "the program holds for S is prime only, and no more is traced"


def test_a_proven_program_goes_before_a_doubtful_one() -> None:
    answers = iter((Step(tiny(7, "S <= 64"), inconclusive=("a guess",)), Step(tiny(8, "S >= 32"))))
    pool = Traces(lambda b, s: next(answers)).pool()
    found, _ = pool.assign([(1, 16), (1, 64), (1, 128)])
    assert [found[1, seq].program for seq in (16, 64, 128)] == [tiny(7, "S <= 64"), *[tiny(8, "S >= 32")] * 2]


def test_rows_have_their_bytes_or_their_reason() -> None:
    trace = Traces(lambda b, s: Step(tiny(512), max_seq=64, inconclusive=() if b > 1 else ("a guess",)))
    table = sweep({Recipe(): trace}, (1, 2), (64, 128), Gpu("", 512 * 64))
    rows = [(row.batch, row.seq, row.numbers and row.numbers.requested, row.reason, row.fits) for row in table.rows]
    limit = "tiny accepts sequences of at most 64 tokens"
    assert rows == [
        (1, 64, 32768, "a guess", True),
        (1, 128, None, limit, None),
        (2, 64, 65536, "a guess", False),
        (2, 128, None, limit, None),
    ]
    assert (table.is_proven, table.fits_nowhere) == (False, False)


def test_the_default_length_is_the_traces() -> None:
    traces = Traces(lambda b, s: Step(tiny(512)))
    table = sweep({Recipe(): traces}, (1, 2), None)
    assert [(row.batch, row.seq) for row in table.rows] == [(1, 64), (2, 64)]
    assert traces.made == [(1, None)]


def test_of_several_recipes_one_may_be_unknown() -> None:
    def opaque(batch: int, seq: int | None) -> Step:
        raise InconclusiveError("an operator without a fake implementation")

    good, gpu = Traces(lambda b, s: Step(tiny(512))), Gpu("", 10**6)
    table = sweep({Recipe(): good, Recipe(checkpoint="full"): opaque}, (1,), (64,), gpu)
    assert [row.reason for row in table.rows] == ["", "an operator without a fake implementation"]
    solved = solve({Recipe(): good, Recipe(checkpoint="full"): opaque}, "B", (64,), gpu)
    assert [(row.value, row.reason) for row in solved.largest] == [
        (30, ""),
        (None, "an operator without a fake implementation"),
    ]
    with pytest.raises(InconclusiveError):
        sweep({Recipe(): opaque}, (1,), (64,))


def test_on_the_cpu_nothing_is_rounded() -> None:
    trace = Traces(lambda b, s: Step(tiny(1)))
    table = sweep({Recipe(): trace, Recipe(target="cpu"): trace}, (1,), (100,))
    assert [row.numbers and row.numbers.allocated for row in table.rows] == [512, 100]
