"""One of the two programs that are compared, at its point: flat, with its live ranges and its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from memir.analysis.domain import check
from memir.analysis.frames import frames_of
from memir.analysis.liveness import LiveRange, Timeline, flat_timeline, flatten, live_ranges
from memir.analysis.peak import Peak, peak
from memir.ir.core import Op, Program
from memir.ir.size import ZERO, Size
from memir.ir.unroll import bind, bound_header

START = -1


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of a program: while operator `op` runs, or right after it. The one before the first is after operator -1."""

    op: int
    after: bool = False


@dataclass(frozen=True)
class Side:
    """A program and the point it is looked at. `env` gives every dim a value; `label` is how the user named it."""

    label: str
    program: Program
    env: Mapping[str, int]
    name: str = ""
    assumptions: tuple[str, ...] = ()
    inconclusive: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self.env, self.program)

    @cached_property
    def flat(self) -> Program:
        """Every layer written out, B and S still symbols."""
        depth = {name: self.env[name] for name in self.program.dims if name not in ("B", "S")}
        return flatten(bind(self.program, depth) if depth else self.program)

    @cached_property
    def line(self) -> Timeline:
        """Live bytes at every operator of `flat`."""
        return flat_timeline(self.flat)

    @cached_property
    def ranges(self) -> dict[str, LiveRange]:
        """Every storage's live range in `flat`, by name."""
        return live_ranges(self.flat)

    @cached_property
    def point(self) -> dict[str, int]:
        """Values of the symbols that `flat` has."""
        return {name: self.env[name] for name in self.flat.dims}

    @cached_property
    def peak_moment(self) -> Moment:
        """The first point that reaches the peak."""
        numbers = self.line.evaluate(self.point)
        if numbers.start == numbers.peak:
            return Moment(START, after=True)
        return Moment(numbers.running.index(numbers.peak))

    @cached_property
    def formula(self) -> Peak:
        """The peak over B and S at this number of layers."""
        _, general = frames_of(self.program)
        depth = {name: self.env[name] for name in self.program.dims if name not in ("B", "S")}
        shown = bound_header(self.program, depth)
        return peak(shown, line=general.bind(depth) if depth else general, env=self.point)

    def live_bytes(self, moment: Moment) -> Size:
        """The live bytes at a moment."""
        line = self.line
        if moment.op == START:
            return line.size(line.start)
        return line.size((line.after if moment.after else line.running)[moment.op])

    def alive(self, moment: Moment) -> dict[str, LiveRange]:
        """The storages that are alive at a moment, by name."""
        found = {}
        for name, live in self.ranges.items():
            if live.storage.device != "gpu":
                continue
            starts = live.storage.live_in or (live.made is not None and live.made <= moment.op)
            last = moment.op + 1 if moment.after else moment.op
            if starts and (live.freed is None or live.freed >= last):
                found[name] = live
        return found

    def scratch(self, moment: Moment) -> Size:
        """The workspace of the operator that runs at a moment."""
        return ZERO if moment.op == START or moment.after else self.line.steps[moment.op].op.scratch

    def op(self, moment: Moment) -> Op | None:
        """The operator at a moment; None before the first."""
        return None if moment.op == START else self.line.steps[moment.op].op

    def phase(self, moment: Moment) -> str:
        """The phase at a moment; `start` before the first operator."""
        return "start" if moment.op == START else self.line.steps[moment.op].phase.name
