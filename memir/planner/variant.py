"""A program for one choice of methods, from the traced step by their passes: its peak and its operators, over B and S."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memir.analysis.cost.device import Device
from memir.analysis.cost.parts import Costs, Parts
from memir.analysis.domain import check
from memir.analysis.flops import work_of
from memir.analysis.frames import frames_of
from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Program
from memir.one_rank import run_on
from memir.parallel.every_stage import of_each_stage
from memir.pipeline import PassError, Pipeline
from memir.planner.space import CHECKPOINTS
from memir.sweep.grid import Grid

Trace = Callable[[int, int], tuple[Program, Mapping[str, int]]]  # (micro-batch, accumulation) -> the step, its fixed symbols
SMALL = 1  # a batch of one is another program; all others share one
SOME = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """The programs of the ranks that differ, one for each stage of a pipeline, and what is read off them.

    `failure`: why there is none.
    """

    text: str
    programs: tuple[Program, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()
    grids: tuple[Grid, ...] = ()
    costs: Costs | None = None  # of the only rank
    failure: str = ""
    refused: bool = False  # the failure is one of the layout, at whatever batch: something does not divide

    def peak(self, batch: int, seq: int) -> tuple[int, str]:
        """Requested bytes of the rank that takes the most, and the phase of its peak.

        UsageError outside of the programs' domain.
        """
        if not self.grids:
            raise UsageError(self.failure)
        for program in self.programs:
            check(self._env(program, batch, seq), program)
        found = [grid.numbers([(batch, seq)])[0] for grid in self.grids]
        most = max(found, key=lambda one: one.requested)
        return most.requested, most.place.phase

    def parts(self, batch: int, seq: int, device: Device, layers: int, microbatches: int) -> Parts:
        """The seconds of computing one of its micro-batches, of which it has so many."""
        if self.costs is None:
            raise UsageError(self.failure)
        return self.costs.at({"B": batch, "S": seq, **dict(self.fixed)}, device, layers, microbatches)

    def _env(self, program: Program, batch: int, seq: int) -> dict[str, int]:
        known = {"B": batch, "S": seq, **dict(self.fixed)}
        return {name: known[name] for name in program.dims}


def kind_of(batch: int, accumulate: int) -> tuple[int, int]:
    """The micro-batch and accumulation that are traced for these: all that are more than one are alike."""
    return min(batch, SOME), min(accumulate, SOME)


class Variants:
    """The variants of one traced step, each made once. `trace` gives the step for a micro-batch and an accumulation."""

    def __init__(self, trace: Trace, progress: Callable[[str], None]) -> None:
        self._trace, self._progress = trace, progress
        self._steps: dict[tuple[int, int], tuple[Program, Mapping[str, int]]] = {}
        self._made: dict[tuple[str, int, int], Variant] = {}

    @property
    def count(self) -> int:
        """How many were made."""
        return len(self._made)

    def step(self, batch: int, accumulate: int) -> tuple[Program, Mapping[str, int]]:
        """The traced step that holds for them: a batch of 1 has its own, and so has more than one micro-batch."""
        key = kind_of(batch, accumulate)
        if key not in self._steps:
            self._progress("tracing" + (" a batch of 1" if key[0] == SMALL else "") + (", accumulating" if key[1] > 1 else ""))
            self._steps[key] = self._trace(*key)
        return self._steps[key]

    def get(self, text: str, batch: int, accumulate: int) -> Variant:
        """The step after the passes of `text`."""
        key = (text, *kind_of(batch, accumulate))
        if key not in self._made:
            program, fixed = self.step(batch, accumulate)
            self._progress(f"{text or 'one gpu'}")
            self._made[key] = self._make(text, program, fixed, key[1:])
        return self._made[key]

    def _make(self, text: str, program: Program, fixed: Mapping[str, int], sizes: tuple[int, int]) -> Variant:
        """Checkpointing is the first pass of many pipelines, and its program is kept."""
        first, comma, rest = text.partition(",")
        before = self._made.get((first, *sizes)) if comma and first in CHECKPOINTS.values() else None
        if before is not None and before.programs:
            return _made(text, rest, before.programs[0], fixed)
        return _made(text, text, program, fixed)


def _made(text: str, passes: str, program: Program, fixed: Mapping[str, int]) -> Variant:
    """The variant `text` by the passes that are still to run; the rows that are printed are verified later."""
    try:
        programs = rewritten(passes, program, fixed, verify=False)
        grids = tuple(Grid(one, fixed=fixed, rounds=False) for one in programs)
        for grid in grids:
            grid.pieces  # noqa: B018 (made now, so that what cannot be told is said here)
        costs = Costs(work_of(programs[0])) if len(programs) == 1 else None
        return Variant(text, programs, tuple(fixed.items()), grids, costs)
    except (UsageError, InconclusiveError) as error:
        return Variant(text, failure=_said(error), refused=isinstance(error, UsageError))
    except PassError as error:
        return Variant(text, failure=f"a bug of memir: {error.message}")


def rewritten(text: str, program: Program, fixed: Mapping[str, int], *, verify: bool = True) -> tuple[Program, ...]:
    """The step of each rank that differs, after the passes; with all layers one by one where they do not repeat afterwards.

    Errors are those of the passes.
    """
    stages = of_each_stage(Pipeline.parse(text).passes)
    return tuple(run_on(Pipeline(s), program, fixed, verify=verify, beyond=InconclusiveError)[0] for s in stages)


def exact(text: str, program: Program, fixed: Mapping[str, int], batch: int, seq: int) -> int:
    """The peak at one point, in requested bytes, by every operator's live bytes and not by the pruned formula."""
    peaks = []
    for one in rewritten(text, program, fixed):
        known = {"B": batch, "S": seq, **fixed}
        _, line = frames_of(one)
        peaks.append(line.evaluate({name: known[name] for name in one.dims}).peak)
    return max(peaks)


def _said(error: MemirError) -> str:
    return error.message + (f" ({error.where})" if error.where else "")
