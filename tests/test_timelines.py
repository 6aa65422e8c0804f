"""Two timelines laid beside each other: the alignment, and each kind of difference that can be told."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from memir.ir.core import Program
from memir.ir.parser import parse
from memir.runtime.measure import Measured, MemoryEvent
from memir.runtime.timelines import common_subsequence, compare

TEXT = """\
memir 1
program @tiny
dim B
storage $w : 4096 parameter live_in live_out
storage $x : 100*B activation
storage $y : 200*B temporary
storage $z : 300*B temporary
value %w: f32[1024] in $w
phase forward
  %x: f32[25*B] in $x = aten.mul.Tensor(%w) at @layers.0 from model.py:5
  %y: f32[50*B] in $y = aten.mm(%x) at @layers.1 from model.py:6
phase backward
  %z: f32[75*B] in $z = aten.add.Tensor(%y) frees $y from model.py:9
  aten.copy_(%z) frees $x, $z
"""
ENV = {"B": 2}


def program() -> Program:
    return parse(TEXT)


def measured(*events: tuple[int, int, str], resident: Sequence[int] = (4096,)) -> Measured:
    """(delta, block, operator) in order; every operator name is one call."""
    calls: dict[str, int] = {}
    total = at_start = peak = sum(resident)
    timeline = []
    for delta, block, op in events:
        total += delta
        peak = max(peak, total)
        call = calls.setdefault(op, len(calls))
        timeline.append(MemoryEvent(delta, total, block, (op,) if op else (), (call,) if op else ()))
    held = tuple(MemoryEvent(size, 0, 1000 + i, ("aten::empty",), (900 + i,)) for i, size in enumerate(resident))
    return Measured("cpu", at_start, peak, total, peak, tuple(timeline), held)


SAME = [
    (200, 1, "aten::mul"),
    (400, 2, "aten::mm"),
    (600, 3, "aten::add"),
    (-400, 2, ""),
    (-200, 1, ""),
    (-600, 3, ""),
]


def test_the_same_timeline_has_no_difference() -> None:
    found = compare(program(), ENV, measured(*SAME))
    assert found.first == ""
    assert found.at_peak == ()
    assert (found.num_predicted, found.num_matched, found.num_workspaces) == (4, 4, 0)


def test_scalars_and_workspaces_are_not_differences() -> None:
    events = [
        *SAME[:1],
        (8, 9, ""),
        (-8, 9, ""),
        (999, 10, "aten::mm"),
        (400, 2, "aten::mm"),
        (-999, 10, "aten::mm"),
        *SAME[2:],
    ]
    found = compare(program(), ENV, measured(*events))
    assert found.first == ""
    assert found.num_workspaces == 1


def test_a_block_of_an_operator_that_the_program_lacks_is_no_workspace() -> None:
    events = [(500, 9, "aten::secret"), (-500, 9, "aten::secret"), *SAME]
    found = compare(program(), ENV, measured(*events))
    assert found.first == "measured only: 500 bytes at aten::secret"


def test_an_allocation_that_only_the_prediction_has() -> None:
    found = compare(program(), ENV, measured(*(e for e in SAME if e[1] != 2)))
    assert found.first == "predicted only: 400 bytes at aten.mm  layers.1  model.py:6"
    assert sum(extra.nbytes for extra in found.at_peak) == 400
    assert [extra.predicted for extra in found.at_peak] == ["aten.mm  layers.1  model.py:6"]


def test_an_earlier_free_is_told_with_both_places() -> None:
    events = [*SAME[:2], (-200, 1, "MulBackward0"), SAME[2], SAME[3], SAME[5]]
    found = compare(program(), ENV, measured(*events))
    head, predicted, real = found.first.splitlines()
    assert "200 bytes of  aten.mul.Tensor  layers.0  model.py:5" in head
    assert "aten.copy_" in predicted
    assert "MulBackward0" in real
    assert [(extra.nbytes, extra.measured) for extra in found.at_peak] == [(200, "not alive there (aten::mul)")]


def test_what_lives_before_the_step_is_compared_too() -> None:
    found = compare(program(), ENV, measured(*SAME, resident=(4096, 5056)))
    assert found.first == "measured only, alive before the step: 5,056 bytes, aten::empty"
    assert sum(extra.nbytes for extra in found.at_peak) == -5056


def test_the_differences_at_the_peak_sum_to_its_error() -> None:
    events = [SAME[0], (900, 7, "aten::other"), *SAME[2:3], (-900, 7, ""), (-200, 1, ""), (-600, 3, "")]
    real = measured(*events)
    found = compare(program(), ENV, real)
    assert sum(extra.nbytes for extra in found.at_peak) == 4096 + 200 + 400 + 600 - real.peak


@given(st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 4), max_size=12))
def test_the_common_subsequence_is_a_longest_one(a: list[int], b: list[int]) -> None:
    pairs = common_subsequence(range(len(a)), range(len(b)), lambda i, j: a[i] == b[j])
    assert all(a[i] == b[j] for i, j in pairs)
    assert pairs == sorted(set(pairs))
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    longest = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            longest[i + 1][j + 1] = longest[i][j] + 1 if x == y else max(longest[i][j + 1], longest[i + 1][j])
    assert len(pairs) == longest[-1][-1]
