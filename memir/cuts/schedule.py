"""A schedule of cuts over a run: its time, its GPU-hours and its peak, relative to training everything on all GPUs.

AutoFreeze's two modes (arXiv 2102.01386, section 5): "time" keeps the GPUs, and steps get faster; "cost" gives GPUs back as the
cut grows, as many as keep a step no slower than the first, with the same global batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memir.cuts.plan import Plan
from memir.errors import UsageError


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


def run(plan: Plan, entries: list[tuple[int, float]], gpus: int, cached: bool) -> Run:
    """The run of these (cut, start) on `gpus` GPUs. Without predicted times, operations stand for them."""
    base = plan.cuts[0].seconds or float(plan.cuts[0].flops)
    batch = dict(plan.env)["B"]
    phases = []
    for number, (cut, start) in enumerate(entries):
        one = plan.cuts[cut]
        end = entries[number + 1][1] if number + 1 < len(entries) else 1.0
        timed = one.cached_seconds if cached and cut else one.seconds
        work = one.cached_flops if cached and cut else one.flops
        step = (timed if timed is not None else work) / base
        needed = max(1, math.ceil(gpus * step - 1e-9))
        grown = math.ceil(batch * gpus / needed)
        peak = plan.bytes_at(cut, {"B": grown}) if grown != batch else one.peak
        phases.append(Phase(cut, start, end - start, step, max(one.peak, peak) if needed < gpus else one.peak, needed, grown))
    time = sum(p.share * p.step for p in phases)
    cost_time = sum(p.share * p.step * gpus / p.gpus for p in phases)
    cost = sum(p.share * p.step * gpus for p in phases) / gpus
    return Run(tuple(phases), time, max(p.peak for p in phases), cost, cost_time)
