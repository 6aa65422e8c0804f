"""Which stretch of a recording is a training step, and where its phases begin.

Two ways. Annotations: a loop that says record_function("forward") and so on, recorded with global_record_annotations=True;
torch.optim says its own, "Optimizer.step#AdamW.step". Otherwise sizes: the requests of the predicted step are looked for around
sizes that it seldom asks for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memir.recorded.recording import Annotation, Event, Recording

OPTIMIZER = "Optimizer.step#"
NUM_TELLING = 12  # sizes that a step is looked for by
ENOUGH = 0.75  # of the requests that are alike in the most alike stretch: a later one with as many is taken instead


@dataclass(frozen=True, slots=True)
class Step:
    """Events from `start` on, before `end`, and the event that each phase begins with, in order."""

    start: int
    end: int
    phases: tuple[tuple[str, int], ...]
    by: str  # "annotations" or "sizes": how it was found


def whole(recording: Recording) -> Step:
    """A recording of one step with annotations, as memir predicts it."""
    found = by_annotations(recording, [a.name for a in recording.annotations])
    return found or Step(0, len(recording.events), (), "annotations")


def requests(recording: Recording, start: int, end: int) -> list[Event]:
    """The allocations among some events."""
    return [event for event in recording.events[start:end] if event.action == "alloc"]


def by_annotations(recording: Recording, phases: Sequence[str]) -> Step | None:
    """The last step whose annotations are these phases in order; None if there is none, or no event has a time."""
    events = recording.events
    if not phases or any(event.time is None for event in events):
        return None
    times = [event.time or 0 for event in events]
    named = [(name, a) for a in sorted(recording.annotations, key=lambda a: a.start) for name in [_phase(a)] if name in phases]
    for first in range(len(named) - len(phases), -1, -1):
        if [name for name, _ in named[first : first + len(phases)]] != list(phases):
            continue
        following = named[first + len(phases) :]
        starts = [bisect_left(times, a.start) for _, a in named[first : first + len(phases)]]
        end = bisect_left(times, following[0][1].start) if following else len(events)
        return Step(starts[0], end, tuple(zip(phases, starts, strict=True)), "annotations")
    return None


def _phase(annotation: Annotation) -> str:
    return "optimizer" if annotation.name.startswith(OPTIMIZER) else annotation.name


def by_sizes(recording: Recording, predicted: Sequence[int]) -> Step | None:
    """The last step that makes about these requests; None if no telling size of them is among the recorded ones.

    Telling are the sizes that the step asks for least often, of these the largest. Around the last of them the step begins
    where the most requests follow that are as predicted, and ends likewise. Of the stretches found, those that have few of the
    sizes that are predicted are left out.
    """
    places = [number for number, event in enumerate(recording.events) if event.action == "alloc"]
    sizes = [recording.events[place].size for place in places]
    counts = Counter(predicted)
    telling = sorted(counts.keys() & set(sizes), key=lambda size: (counts[size], -size))[:NUM_TELLING]
    found = [stretch for size in telling if (stretch := _around(size, counts[size], sizes, predicted)) is not None]
    if not found:
        return None
    alike = {stretch: (Counter(sizes[stretch[0] : stretch[1]]) & counts).total() for stretch in found}
    start, end = max(stretch for stretch in found if alike[stretch] >= ENOUGH * max(alike.values()))
    return Step(places[start], places[end] if end < len(places) else len(recording.events), (), "sizes")


def _around(size: int, count: int, sizes: Sequence[int], predicted: Sequence[int]) -> tuple[int, int] | None:
    """The last stretch of `sizes` that looks like the step, by the last of the `count` requests of this size in it."""
    anchor = len(predicted) - 1 - predicted[::-1].index(size)
    found = [at for at, nbytes in enumerate(sizes) if nbytes == size]
    for number in range(len(found) - 1, count - 2, -1):
        at = found[number]
        low = found[number - count] + 1 if number >= count else 0
        high = found[number + 1] if number + 1 < len(found) else len(sizes)
        if at - low < anchor // 2 or high - at < (len(predicted) - anchor) // 2:
            continue  # a step that the recording has only a part of
        start = _best(range(low, at + 1), at - anchor, lambda first: _common(sizes, first, predicted, 0, 1))
        end = _best(
            range(at + 1, high + 1),
            start + len(predicted),
            lambda last: _common(sizes, last - 1, predicted, len(predicted) - 1, -1),
        )
        return start, end
    return None


def _best(candidates: range, near: int, score: Callable[[int], int]) -> int:
    """The candidate with the highest score, of equal ones the nearest."""
    return max(candidates, key=lambda place: (score(place), -abs(place - near)))


def _common(one: Sequence[int], at: int, other: Sequence[int], there: int, step: int) -> int:
    """How many members two sequences have in common, from these places on, forwards (`step` 1) or backwards (-1)."""
    number = 0
    while 0 <= at < len(one) and 0 <= there < len(other) and one[at] == other[there]:
        at, there, number = at + step, there + step, number + 1
    return number
