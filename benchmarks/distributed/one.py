"""One case looked at closely: the figures by rank, the events around the peak, and a pass's program beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memir.analysis.liveness import timeline
from memir.api import program_of
from memir.cli.options import Request
from memir.ir.core import Program
from memir.pipeline import Pipeline
from memir.runtime.measure import Measured
from memir.runtime.timelines import compare

_SHOWN = 4  # operators of an event's stack, the innermost


@dataclass(frozen=True, slots=True)
class Around:
    """How many events before and after the peak are shown."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """A pass's program and the values of its symbols."""

    program: Program
    env: dict[str, int]


def predict(request: Request, batch: int, seq: int, passes: str) -> Predicted:
    """The step traced and rewritten by the passes, at numbers."""
    keywords = {**request.program_keywords(), "batch": batch, "seq": seq}
    traced = program_of(request.model, request.recipe, **keywords)
    program = Pipeline.parse(passes).run(traced.program)
    values = {**traced.dims, "B": batch, "S": seq}
    return Predicted(program, {name: value for name, value in values.items() if name in program.dims})


def show(ranks: Sequence[Measured], rank: int, around: Around) -> str:
    """A table of the ranks, and the events around `rank`'s peak: bytes, total after it, operators around it."""
    lines = [f"{'rank':>4} {'at start':>16} {'peak':>16} {'at end':>16} {'over start':>16}"]
    lines += [
        f"{number:>4} {m.at_start:>16,} {m.peak:>16,} {m.at_end:>16,} {m.peak - m.at_start:>16,}"
        for number, m in enumerate(ranks)
    ]
    measured = ranks[rank]
    peak = next((i for i, event in enumerate(measured.timeline) if event.total == measured.peak), 0)
    lines += ["", f"rank {rank}: events around the peak (number {peak} of {len(measured.timeline)})"]
    for number in range(max(0, peak - around.before), min(len(measured.timeline), peak + around.after + 1)):
        event = measured.timeline[number]
        mark = "peak" if number == peak else ""
        where = " / ".join(event.ops[-_SHOWN:]) or "Python"
        lines.append(f"{number:>6} {event.delta:>+14,} {event.total:>16,} {mark:4} {where}")
    return "\n".join(lines)


def show_comparison(predicted: Predicted, measured: Measured) -> str:
    """The three figures of both, the first difference of the timelines, and what differs at the peak."""
    numbers = timeline(predicted.program).evaluate(predicted.env)
    end = numbers.after[-1] if numbers.after else numbers.start
    lines = ["", f"{'':10} {'predicted':>16} {'measured':>16} {'error':>12}"]
    for name, told, real in (
        ("at start", numbers.start, measured.at_start),
        ("peak", numbers.peak, measured.peak),
        ("at end", end, measured.at_end),
    ):
        lines.append(f"{name:10} {told:>16,} {real:>16,} {told - real:>+12,}  {100 * (told - real) / real:+.4f} %")
    found = compare(predicted.program, predicted.env, measured)
    lines.append(f"{found.num_matched} of {found.num_predicted} predicted and {found.num_measured} measured allocations match")
    lines += ["first difference:", *(f"  {line}" for line in found.first.splitlines())] if found.first else []
    lines += [f"  {e.nbytes:>+14,}  {e.count:>3} x  {e.predicted or '-'}  |  {e.measured or '-'}" for e in found.at_peak]
    return "\n".join(lines)
