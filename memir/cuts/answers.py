"""What the cuts of a step say to somebody who has a budget."""

from __future__ import annotations

from dataclasses import dataclass

from memir.cuts.cost import Kept, kept
from memir.cuts.plan import Plan
from memir.cuts.reading import Cut

LONGEST = 1 << 24  # tokens; where the model has no limit of its own
NEGLIGIBLE = 0.01  # of the peak: freezing more is said to buy no memory when all of the rest buys less


@dataclass(frozen=True, slots=True)
class Stretch:
    """Cuts whose peak lies in the same phase and operator."""

    first: int
    last: int
    phase: str
    op: str
    path: str
    source: str


@dataclass(frozen=True, slots=True)
class Answers:
    """`fits` is the smallest cut that fits (None: none does, or no budget); `enough` the cut after which the rest buys less
    than 1 % of the peak; `best` the cut of the objective, among those that fit; `places` where the peak lies as k grows."""

    fits: int | None
    enough: int
    best: int | None
    places: tuple[Stretch, ...]
    largest_batch: tuple[int, ...] | None  # of each cut, with a budget
    largest_seq: tuple[int, ...] | None
    kept: tuple[Kept, ...] = ()  # of each cut, where GPUs can be given back


def answers(
    plan: Plan, budget: int | None, objective: str, max_seq: int | None = None, *, gpus: int = 1, cached: bool = False
) -> Answers:
    """The answers for a budget in bytes. `objective` is "memory", "time", or "cost": GPU-hours, of `gpus` GPUs those that a cut
    does not need given back; `cached`: of steps that read a cache. `max_seq` is the longest sequence the model takes."""
    cuts = plan.cuts
    few = tuple(kept(plan, c.cut, gpus, cached=cached, budget=budget) for c in cuts) if gpus > 1 else ()
    fitting = [c for c in cuts if budget is None or c.peak <= budget]
    least = min(c.peak for c in cuts)
    enough = next(c.cut for c in cuts if c.peak - least <= NEGLIGIBLE * c.peak)
    best: Cut | None = None
    if fitting:
        if objective == "memory":
            best = min(fitting, key=lambda c: (c.peak, c.cut))
        elif objective == "cost":
            best = min(fitting, key=lambda c: (few[c.cut].hours, few[c.cut].gpus, c.cut))
        else:
            best = min(fitting, key=lambda c: (c.seconds if c.seconds is not None else c.flops, c.cut))
    batches = seqs = None
    if budget is not None:
        batches = tuple(plan.largest(c.cut, "B", budget) for c in cuts)
        seqs = tuple(plan.largest(c.cut, "S", budget, max_seq or LONGEST) for c in cuts)
    return Answers(
        fits=fitting[0].cut if budget is not None and fitting else None,
        enough=enough,
        best=None if best is None else best.cut,
        places=_places(cuts),
        largest_batch=batches,
        largest_seq=seqs,
        kept=few,
    )


def _places(cuts: tuple[Cut, ...]) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    for cut in cuts:
        if found and (found[-1].phase, found[-1].op, found[-1].source) == (cut.phase, cut.op, cut.source):
            last = found.pop()
            found.append(Stretch(last.first, cut.cut, last.phase, last.op, last.path, last.source))
        else:
            found.append(Stretch(cut.cut, cut.cut, cut.phase, cut.op, cut.path, cut.source))
    return tuple(found)
