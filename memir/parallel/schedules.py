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

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]
Kind = Literal["F", "B"]  # a forward; a whole backward


@dataclass(frozen=True, slots=True)
class Action:
    """A part of the step that a rank runs: `kind` of one micro-batch in one of its stages, both counted from 0."""

    kind: Kind
    stage: int
    micro: int


def stages_of(rank: int, degree: int, a_rank: int) -> tuple[int, ...]:
    """The stages of a rank that has `a_rank` of them, in a loop (`generate_stage_to_rank_mapping`): rank, rank + degree, ..."""
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
    return _interleaved(rank, degree, a_rank, microbatches)


def _interleaved(rank: int, degree: int, a_rank: int, microbatches: int) -> tuple[Action, ...]:
    """Rounds of `degree` micro-batches go through the first of the rank's stages, then through the next."""
    rounds = max(1, microbatches // degree)
    if microbatches % rounds:
        message = f"interleaved-1f1b: {microbatches} micro-batches are not {rounds} equal rounds over {degree} ranks"
        raise UsageError(message, hint=f"a multiple of {degree}, or fewer than {2 * degree}, is")
    a_round = microbatches // rounds
    total = microbatches * a_rank
    warmup = min((a_rank - 1) * a_round + 2 * (degree - 1 - rank), total)

    def forward(step: int) -> int:
        return step // a_round % a_rank * degree + rank

    def backward(step: int) -> int:
        return (a_rank - 1 - step // a_round % a_rank) * degree + rank

    return _one_by_one(warmup, total, forward, backward)


def _one_by_one(warmup: int, total: int, forward: Callable[[int], int], backward: Callable[[int], int]) -> tuple[Action, ...]:
    """`warmup` forwards, then a backward after each forward, then the backwards that are left; `forward(n)` and `backward(n)`
    give the stage of the n-th of each."""
    done: Counter[tuple[Kind, int]] = Counter()
    order: list[Action] = []

    def run(kind: Kind, stage: int) -> None:
        order.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1

    for step in range(total + warmup):
        if step < total:
            run("F", forward(step))
        if step >= warmup:
            run("B", backward(step - warmup))
    return tuple(order)
