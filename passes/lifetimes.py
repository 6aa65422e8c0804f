"""Lifetimes: every storage gets a known end.

The frees in a program are observed: in eager PyTorch a storage dies when its last reference dies, and only the trace sees when
that is. So this pass never moves one. It adds what lacks: a storage that is neither freed anywhere nor alive after the step
(text written by hand, or a rewrite that dropped its frees) dies at its last use, the earliest moment that is possible.

After it every storage has a live range and a size. They are derived from the program and not stored in it, so that no rewrite
can leave them out of date: `memir.analysis.liveness` returns them (`live_ranges`, and `timeline` for the live bytes as
polynomials), and `memir ir --live` prints them after each operator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from memir.analysis.liveness import flatten, live_ranges
from memir.ir.core import Op, Phase, Program


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Adds the frees that lack; a program in which none does comes back unchanged."""

    name: ClassVar[str] = "lifetimes"
    accepts_unverified: ClassVar[bool] = True  # a storage that is never freed is what it mends

    def run(self, program: Program) -> Program:
        """The program with every storage freed once or live_out. A Repeat is unrolled if something has to be added.

        A storage that was alive before the step and is never used dies after the first operator. InconclusiveError for a Repeat
        whose count is a symbol.
        """
        flat = flatten(program)
        ends: dict[int, list[str]] = {}
        for name, live in live_ranges(flat).items():
            if live.freed is None and not live.storage.live_out and (live.made is not None or live.storage.live_in):
                ends.setdefault(live.last_use or 0, []).append(name)
        if not ends or not any(phase.ops for phase in flat.phases):
            return program
        phases, position = [], 0
        for phase in flat.phases:
            ops = []
            for op in phase.ops:
                assert isinstance(op, Op)  # `flat` has no Repeat
                ops.append(replace(op, frees=(*op.frees, *ends[position])) if position in ends else op)
                position += 1
            phases.append(Phase(phase.name, tuple(ops)))
        return replace(flat, phases=tuple(phases))
