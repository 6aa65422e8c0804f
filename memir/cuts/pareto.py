"""What to choose from: cut, batch, checkpointing and cache, without what another choice beats in everything.

A choice is better the less it freezes, the less memory it takes and the faster it is for each sample. Which of them to take is
a question of accuracy, card and time: what remains here is the Pareto set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from memir.cuts.plan import Plan
from memir.errors import UsageError


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run; `peak` in bytes, `sample` the time of a sample in seconds, or its operations where no card is named."""

    cut: int
    batch: int
    checkpointed: bool
    cached: bool
    peak: int
    sample: float


def choices(plan: Plan, budget: int, *, checkpointed: bool, cached: bool) -> list[Choice]:
    """Every cut at the batches 1, 2, 4, ... that fit `budget` bytes, and at the largest one."""
    found = []
    for cut in range(len(plan.cuts)):
        largest = plan.largest(cut, "B", budget)
        for batch in sorted({largest, *(1 << n for n in range(largest.bit_length()))} - {0}):
            try:
                at = plan.at(cut, {"B": batch})
            except UsageError:
                continue  # below the batches that the trace holds for
            for reads in (False, True) if cached and cut else (False,):
                step = (at.cached_seconds if reads else at.seconds) or float(at.cached_flops if reads else at.flops)
                found.append(Choice(cut, batch, checkpointed, reads, at.peak, step / batch))
    return found


def pareto(found: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those that no other beats or equals by cut, peak and time; ordered by cut, then peak."""
    kept: list[Choice] = []
    peaks: list[int] = []  # of those kept so far that none with a lower or equal cut beats, rising
    samples: list[float] = []  # theirs, falling
    for choice in sorted(found, key=lambda c: (c.cut, c.peak, c.sample, c.batch)):
        place = bisect_right(peaks, choice.peak)
        if place and samples[place - 1] <= choice.sample:
            continue
        kept.append(choice)
        end = place
        while end < len(samples) and samples[end] >= choice.sample:
            end += 1
        peaks[place:end], samples[place:end] = [choice.peak], [choice.sample]
    return tuple(kept)


def fastest(found: Sequence[Choice]) -> tuple[Choice, ...]:
    """Of a Pareto set the fastest at each cut, where it is faster than every lower cut."""
    kept: list[Choice] = []
    for choice in sorted(found, key=lambda c: (c.cut, c.sample)):
        if not kept or (choice.cut > kept[-1].cut and choice.sample < kept[-1].sample):
            kept.append(choice)
    return tuple(kept)
