"""How many GPUs a cut can give back: the mode "cost" of AutoFreeze (arXiv 2102.01386, section 5).

The global batch stays. A step of r times the work of the first one's takes no longer than that on ceil(r * N) of N GPUs, each
with a larger share of the batch, which has to fit. Work is taken to divide evenly, so GPU-hours are r of the first step's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memir.cuts.plan import Plan


@dataclass(frozen=True, slots=True)
class Kept:
    """The GPUs that a cut keeps: so many, each with `batch` samples and `peak` bytes; `hours`: GPU-hours relative to cut 0."""

    gpus: int
    batch: int
    peak: int
    hours: float


def kept(plan: Plan, cut: int, gpus: int, *, cached: bool = False, budget: int | None = None) -> Kept:
    """The fewest of `gpus` GPUs that keep a step of the cut no slower than the first, and whose batch fits `budget` bytes.

    Without predicted times, operations stand for them.
    """
    one, first = plan.cuts[cut], plan.cuts[0]
    if one.seconds is not None and first.seconds is not None:
        hours = ((one.cached_seconds or one.seconds) if cached and cut else one.seconds) / first.seconds
    else:
        hours = (one.cached_flops if cached and cut else one.flops) / first.flops
    batch = dict(plan.env)["B"]
    for few in range(max(1, math.ceil(gpus * hours - 1e-9)), gpus):
        grown = math.ceil(batch * gpus / few)
        peak = plan.bytes_at(cut, {"B": grown}) if grown != batch else one.peak
        if budget is None or peak <= budget:
            return Kept(few, grown, peak, hours)
    return Kept(gpus, batch, one.peak, hours)
