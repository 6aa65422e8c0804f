"""A schedule of cuts over a run: its time, its GPU-hours and its peak, relative to training everything on all GPUs.

AutoFreeze's two modes (arXiv 2102.01386, section 5): "time" keeps the GPUs, and steps get faster; "cost" gives GPUs back as the
cut grows (`memir.cuts.cost`), with the same global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from memir.cuts.cost import kept
from memir.cuts.plan import Plan
from memir.errors import UsageError

TESTS = 10  # of a run; the released code's --num_intervals


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run at one cut: from `start` on (a fraction of all steps)."""

    cut: int
    start: float
    share: float  # of the steps
    step: float  # time of a step relative to cut 0, on the same GPUs
    peak: int  # bytes on each GPU, at the batch it has then
    gpus: int  # in the mode "cost"
    batch: int  # a GPU's, in the mode "cost"


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. Times are relative to the same number of steps at cut 0 on all GPUs."""

    phases: tuple[Phase, ...]
    time: float  # all GPUs kept
    peak: int
    cost: float  # GPU-hours, GPUs given back
    cost_time: float


def parse(text: str, last: int) -> list[tuple[int, float]]:
    """`0@0,4@0.3,8@0.6`: cut@fraction of the run. UsageError for one that goes back, or a cut that the model has not."""
    found: list[tuple[int, float]] = []
    for part in text.split(","):
        cut, at, start = part.strip().partition("@")
        try:
            entry = (int(cut), float(start))
        except ValueError:
            raise UsageError(f"--schedule: {part.strip()!r} is not cut@fraction", hint="write  0@0,4@0.3,8@0.6") from None
        if not at or not 0 <= entry[1] < 1:
            raise UsageError(f"--schedule: {part.strip()!r}: the fraction of the run lies from 0 to below 1")
        if not 0 <= entry[0] <= last:
            raise UsageError(f"--schedule: cut {entry[0]}: a cut is 0 to {last}")
        if found and (entry[0] < found[-1][0] or entry[1] <= found[-1][1]):
            raise UsageError(
                f"--schedule goes back: {cut}@{start} after {found[-1][0]}@{found[-1][1]:g}",
                hint="frozen layers stay frozen: cuts and fractions only grow",
            )
        found.append(entry)
    return found if found[0][1] == 0 else [(0, 0.0), *found]


def autofreeze(text: str, depth: int, last: int) -> list[tuple[int, float]]:
    """`autofreeze`, `autofreeze:20`: the fastest growth that AutoFreeze's rule allows in so many tests of its gradients.

    At each test, from the second one on (the first has nothing to compare with), the prefix grows to the first layer whose
    gradients' norm changes no less than the median's of the layers that are left (arXiv 2102.01386, section 4.1; the released
    code, percentile 50). Where the front layers settle first, which the method rests on, that is half of them, rounded down;
    the last one stays trained. Real gradients may freeze less at a test, never more of a prefix that settles in order.
    UsageError: no whole number of tests, or less than two.
    """
    _, colon, number = text.partition(":")
    if colon and not number.isdigit():
        raise UsageError(f"--schedule: {text!r}: {number!r} is no number of tests", hint="write  autofreeze:20")
    tests = int(number) if colon else TESTS
    if tests < 2:
        raise UsageError("--schedule: autofreeze compares two tests: give it at least 2", hint="write  autofreeze:20")
    entries, cut = [(0, 0.0)], 0
    for test in range(2, tests):
        grown = min(cut + (depth - cut) // 2, last)
        if grown > cut:
            cut = grown
            entries.append((cut, test / tests))
    return entries


def run(plan: Plan, entries: list[tuple[int, float]], gpus: int, cached: bool, budget: int | None = None) -> Run:
    """The run of these (cut, start) on `gpus` GPUs of `budget` bytes. Without predicted times, operations stand for them."""
    phases = []
    for number, (cut, start) in enumerate(entries):
        end = entries[number + 1][1] if number + 1 < len(entries) else 1.0
        few = kept(plan, cut, gpus, cached=cached, budget=budget)
        peak = max(plan.cuts[cut].peak, few.peak)
        phases.append(Phase(cut, start, end - start, few.hours, peak, few.gpus, few.batch))
    time = sum(p.share * p.step for p in phases)
    cost_time = sum(p.share * p.step * gpus / p.gpus for p in phases)
    return Run(tuple(phases), time, max(p.peak for p in phases), time, cost_time)
