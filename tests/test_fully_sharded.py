"""What the passes of fully sharded data parallelism conserve over the ranks, and what they refuse."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from memir.analysis.liveness import timeline
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Program
from memir.ir.parser import parse
from memir.ir.size import Size
from memir.ir.unroll import bind, unroll
from memir.passes.fsdp import Fsdp
from memir.passes.fsdp1 import Fsdp1

GOLDEN = Path(__file__).parent / "golden"
PASSES = [
    Fsdp(degree=Size.of(2)),
    Fsdp(degree=Size.of(4), reshard="false"),
    Fsdp1(degree=2),
    Fsdp1(degree=4, strategy="grad-op"),
]


def read(name: str) -> Program:
    return parse((GOLDEN / name).read_text(encoding="utf-8").partition("# ---")[0])


def resident(program: Program) -> Counter[Kind]:
    """Bytes alive before the step, by kind."""
    total: Counter[Kind] = Counter()
    for storage in program.storages:
        if storage.live_in and storage.nbytes.is_constant:
            total[storage.kind] += storage.nbytes.constant
    return total


def lasting_gradients(program: Program) -> int:
    """Bytes of gradients that the optimizer's phase sees."""
    seen = {o for phase, op in program.ops() if phase.name == "optimizer" for o in op.operands}
    made = {r.name: r.storage for _, op in program.ops() for r in op.results}
    names = {made[o] for o in seen if o in made}
    return sum(s.nbytes.constant for s in program.storages if s.kind == Kind.GRADIENT and s.name in names)


@pytest.mark.parametrize("one", PASSES, ids=str)
def test_the_ranks_together_hold_what_one_holds_alone(one: Fsdp | Fsdp1) -> None:
    """Padding aside, and with it no rank holds more than its part of the padded whole."""
    program = read("fsdp/degree_2.memir")
    alone = resident(unroll(program))
    degree = int(str(one.degree))
    ranks = [replace(one, rank=rank).run(program) for rank in range(degree)]
    whole = sum(resident(unroll(each))[Kind.PARAMETER] for each in ranks)
    padding = whole - alone[Kind.PARAMETER]
    assert 0 <= padding <= (degree - 1) * 4 * 10 * 4  # at most degree - 1 rows, of 10 numbers at most, a parameter
    assert 0 <= sum(map(lasting_gradients, ranks)) - alone[Kind.PARAMETER] == padding


@pytest.mark.parametrize("one", PASSES, ids=str)
def test_folded_layers_are_those_of_the_flat_program(one: Fsdp | Fsdp1) -> None:
    program = read("fsdp/depth.memir")
    env = {"B": 3, "S": 5, "L": 9}
    folded = unroll(one.run(program), {"L": 9})
    flat = one.run(unroll(program, {"L": 9}))
    points = [timeline(each).evaluate({d: v for d, v in env.items() if d in each.dims}) for each in (folded, flat)]
    assert points[0] == points[1]
    assert bind(folded, {"B": 3}).mesh == flat.mesh


@pytest.mark.parametrize("degree", [2, 3, 7])
def test_the_degree_may_stay_a_symbol(degree: int) -> None:
    program = read("fsdp/depth.memir")
    symbolic = bind(Fsdp(degree=Size.of("n")).run(program), {"n": degree, "L": 6})
    numbers = bind(Fsdp(degree=Size.of(degree)).run(program), {"L": 6})
    env = {"B": 2, "S": 3}
    assert timeline(unroll(symbolic)).evaluate(env) == timeline(unroll(numbers)).evaluate(env)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (Fsdp(degree=Size.of(0)), "not a positive number"),
        (Fsdp(degree=Size.of(2), rank=2), "no rank 2"),
        (Fsdp(degree=Size.of(2), reshard="often"), "default, true, false"),
        (Fsdp(degree=Size.of(4), reshard="3"), "does not divide"),
        (Fsdp(degree=Size.of(2), param_dtype="bf16"), "traced in f32"),
        (Fsdp(degree=Size.of(2), shard_dtype="bf16"), "in which the step computes"),
        (Fsdp1(degree=2, param_dtype="f16"), "traced in f32"),
        (Fsdp1(degree=2, rank=-1), "no rank -1"),
        (Fsdp1(degree=2, strategy="hybrid"), "hybrid strategies have replicate groups"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(one: Fsdp | Fsdp1, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        one.run(read("fsdp/degree_2.memir"))


def test_outputs_of_another_type_are_another_step() -> None:
    with pytest.raises(InconclusiveError, match="another step"):
        Fsdp(degree=Size.of(2), output_dtype="bf16").run(read("fsdp/degree_2.memir"))


def test_a_second_time_is_refused() -> None:
    sharded = Fsdp(degree=Size.of(2)).run(read("fsdp/degree_2.memir"))
    with pytest.raises(UsageError, match="this axis already"):
        Fsdp(degree=Size.of(2)).run(sharded)
