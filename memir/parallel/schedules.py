"""Pipeline schedules: which rank holds which stages, and in which order it runs forwards and backwards of micro-batches.

As torch/distributed/pipelining/schedules.py runs them: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B
(arXiv 2104.04473, section 2.2), ScheduleInterleavedZeroBubble and ScheduleZBVZeroBubble (arXiv 2401.10241, sections 2 and 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from memir.errors import UsageError

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"]
Kind = Literal["F", "B", "I", "W"]  # a forward; a whole backward, or that of the input, and that of the weights


@dataclass(frozen=True, slots=True)
class Action:
    """A part of the step that a rank runs: `kind` of one micro-batch in one of its stages, both counted from 0."""

    kind: Kind
    stage: int
    micro: int


def stages_of(schedule: Schedule, rank: int, degree: int, a_rank: int) -> tuple[int, ...]:
    """The stages of a rank that has `a_rank` of them (`generate_stage_to_rank_mapping`): rank, rank + degree, ...; of a V, both
    of its arms at one height.
    """
    if schedule == "zbv":
        return (rank, 2 * degree - 1 - rank)
    return tuple(rank + turn * degree for turn in range(a_rank))


def actions(schedule: Schedule, rank: int, degree: int, a_rank: int, microbatches: int) -> tuple[Action, ...]:
    """What the rank runs in a step, in order.

    UsageError for a number of micro-batches that the schedule refuses, as PyTorch's own constructors do.
    """
    if schedule == "gpipe":
        forward = [Action("F", rank, m) for m in range(microbatches)]
        return (*forward, *(Action("B", rank, m) for m in range(microbatches)))
    if schedule == "1f1b":
        if microbatches < degree:
            message = f"1f1b: {microbatches} micro-batches do not fill {degree} stages"
            raise UsageError(message, hint=f"pipeline-parallel{{degree={degree} schedule=1f1b microbatches={degree}}}")
        return _one_by_one(min(microbatches, degree - rank) - 1, microbatches, lambda _: rank, lambda _: rank)
    if schedule == "zbv":
        return _v(rank, degree, microbatches)
    return _interleaved(schedule, rank, degree, a_rank, microbatches)


def _interleaved(schedule: Schedule, rank: int, degree: int, a_rank: int, microbatches: int) -> tuple[Action, ...]:
    """Rounds of `degree` micro-batches go through the first of the rank's stages, then through the next.

    With zero bubbles the warm-up is shorter, and the backwards of weights begin `rank` steps after those of inputs.
    """
    rounds = max(1, microbatches // degree)
    if microbatches % rounds:
        message = f"{schedule}: {microbatches} micro-batches are not {rounds} equal rounds over {degree} ranks"
        raise UsageError(message, hint=f"a multiple of {degree}, or fewer than {2 * degree}, is")
    a_round = microbatches // rounds
    total = microbatches * a_rank
    zero_bubble = schedule == "zero-bubble"
    warmup = min((a_rank - 1) * a_round + (1 if zero_bubble else 2) * (degree - 1 - rank), total)

    def forward(step: int) -> int:
        return step // a_round % a_rank * degree + rank

    def backward(step: int) -> int:
        return (a_rank - 1 - step // a_round % a_rank) * degree + rank

    return _one_by_one(warmup, total, forward, backward, rank if zero_bubble else None)


def _one_by_one(
    warmup: int, total: int, forward: Callable[[int], int], backward: Callable[[int], int], delay: int | None = None
) -> tuple[Action, ...]:
    """`warmup` forwards, then a backward after each forward, then the backwards that are left; `forward(n)` and `backward(n)`
    give the stage of the n-th of each. With `delay` the backward is that of the input, that of the weights so much later."""
    done: Counter[tuple[Kind, int]] = Counter()
    order: list[Action] = []

    def run(kind: Kind, stage: int) -> None:
        order.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1

    for step in range(total + warmup):
        if step < total:
            run("F", forward(step))
        if step >= warmup:
            run("B" if delay is None else "I", backward(step - warmup))
        if delay is not None and step >= warmup + delay:
            run("W", backward(step - warmup - delay))
    for step in range(total - delay, total) if delay is not None else ():
        run("W", backward(step))
    return tuple(order)


def _v(rank: int, degree: int, microbatches: int) -> tuple[Action, ...]:
    """ScheduleZBVZeroBubble (arXiv 2401.10241, section 6): micro-batches go down one arm of a V and up the other.

    The order is that of at least 2 * degree - 1 micro-batches, from which those that there are not are left out.
    """
    down, up = rank, 2 * degree - 1 - rank
    many = max(2 * degree - 1, microbatches)
    done: Counter[tuple[Kind, int]] = Counter()
    order: list[Action] = []

    def run(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            order.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (degree - rank) - 1):
        run(down, "F")
    for _ in range(rank):
        run(up, "F")
        run(down, "F")
    for _ in range(degree - rank):
        run(up, "F", "I", "W")
    while done["F", up] < done["F", down] or done["F", down] < many:
        if done["F", down] < many:
            run(down, "F")
        run(down, "I", "W")
        run(up, "F", "I", "W")
    for _ in range(rank):
        run(down, "I")
        run(up, "I")
    for _ in range(degree - rank):
        run(down, "I", "W")
    for stage in (up, down):
        while done["W", stage] < done["I", stage]:
            run(stage, "W")
    return tuple(action for action in order if action.micro < microbatches)
