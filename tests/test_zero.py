"""DeepSpeed's ZeRO as a pass: nothing is lost over the ranks, partitions and coordinator by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from memir.analysis.liveness import timeline
from memir.ir.core import Kind, Program
from memir.ir.parser import parse
from memir.ir.verify import verify
from memir.parallel.coordinator import Coordinator, Limits
from memir.parallel.module_calls import Call
from memir.parallel.partitions import Group, Piece, round_robin
from memir.pipeline import Pipeline

STEP = Path(__file__).parent / "golden" / "zero" / "stage2.memir"
NUMEL, PARAMETERS = 112, 4


def step() -> Program:
    """Four bf16 parameters of 40, 40, 16 and 16 elements with one optimizer state each."""
    return parse(STEP.read_text())


def under(text: str) -> Program:
    program = Pipeline.parse(text).run(step())
    verify(program)
    return program


def resident(program: Program, kind: Kind, device: str | None = None) -> int:
    here = [s for s in program.storages if s.kind == kind and s.live_in and device in (None, s.device)]
    return sum(s.nbytes.evaluate({}) for s in here)


@pytest.mark.parametrize("degree", [2, 3, 4, 7])
@pytest.mark.parametrize("stage", ["1", "2"])
def test_ranks_have_each_element_once(stage: str, degree: int) -> None:
    programs = [under(f"zero{{stage={stage} degree={degree} rank={r} reduce-bucket-size=60}}") for r in range(degree)]
    padded = -(-NUMEL // (2 * degree)) * 2 * degree
    steps = 4 * degree  # the count of steps, a number on each rank
    assert sum(resident(p, Kind.OPTIMIZER_STATE) for p in programs) == 8 * padded + steps  # master and state in fp32
    assert {resident(p, Kind.PARAMETER) for p in programs} == {2 * padded}


@pytest.mark.parametrize("degree", [2, 3])
def test_stage_3_cuts_every_parameter(degree: int) -> None:
    program = under(f"zero{{stage=3 degree={degree} param-persistence-threshold=0 reduce-bucket-size=50}}")
    parts = sum(-(-n // degree) for n in (40, 40, 16, 16))
    assert resident(program, Kind.PARAMETER) == 2 * parts
    assert resident(program, Kind.GRADIENT) == 2 * parts
    assert resident(program, Kind.OPTIMIZER_STATE) == 8 * parts + 4
    assert resident(program, Kind.COLLECTIVE) == 2 * 50


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_what_is_offloaded_is_on_the_host(stage: str) -> None:
    text = f"zero{{stage={stage} degree=2 reduce-bucket-size=60 offload-optimizer}}"
    program = under(text)
    assert resident(program, Kind.OPTIMIZER_STATE, "gpu") == 4  # the count of steps
    assert resident(program, Kind.OPTIMIZER_STATE, "host") == 8 * NUMEL // 2
    whole = timeline(under(text.replace(" offload-optimizer", ""))).evaluate({"B": 2, "S": 4})
    assert timeline(program).evaluate({"B": 2, "S": 4}).start < whole.start


def test_gradients_die_earlier_from_stage_to_stage() -> None:
    ends = []
    for stage in "12":
        program = under(f"zero{{stage={stage} degree=2 reduce-bucket-size=40}}")
        held = timeline(program).evaluate({"B": 1, "S": 1})
        ends.append(held.peak)
    assert ends[0] >= ends[1]


def test_partitions_end_within_parameters() -> None:
    group = Group((("a", 5), ("b", 8), ("c", 2)), "bf16", 3)  # 15 elements, 18 with padding
    assert (group.padded, group.partition) == (18, 6)
    assert group.pieces(0) == (Piece("a", 5, whole=True), Piece("b", 1, whole=False))
    assert group.pieces(1) == (Piece("b", 6, whole=False),)
    assert group.pieces(2) == (Piece("b", 1, whole=False), Piece("c", 2, whole=True))
    assert group.ranks_of("b") == ((0, 1), (1, 6), (2, 1))
    assert round_robin([("a", 1), ("b", 2), ("c", 3)], 2) == (("a", 1), ("c", 3), ("b", 2))


def coordinator(*, ahead: int, reuse: int) -> Coordinator:
    calls = [
        Call("first", ("a",), 0, 0, forward=True),
        Call("second", ("b",), 1, 1, forward=True),
        Call("second", ("b",), 2, 2, forward=False),
        Call("first", ("a",), 3, 3, forward=False),
    ]
    plan = Coordinator((), {"a": 10, "b": 20}, frozenset(), Limits(ahead, 1000, reuse))
    plan.begin(calls)
    return plan


def test_the_next_module_is_gathered_ahead() -> None:
    plan = coordinator(ahead=5, reuse=0)
    first, second = plan.calls[0], plan.calls[1]
    assert plan.fetch(first) == (["a"], ["b"])
    assert plan.release(first) == ["a"]
    assert plan.fetch(second)[0] == []


def test_parameters_that_come_again_soon_stay() -> None:
    plan = coordinator(ahead=0, reuse=50)
    seen = [(plan.fetch(call), plan.release(call)) for call in plan.calls]
    assert seen == [((["a"], []), []), ((["b"], []), []), (([], []), ["b"]), (([], []), ["a"])]
