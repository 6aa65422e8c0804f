"""A program for one choice of methods, from the traced step by their passes: its peak and its operators, over B and S."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from memir.analysis.cost.device import Device
from memir.analysis.cost.parts import Costs, Parts
from memir.analysis.domain import check
from memir.analysis.flops import work_of
from memir.analysis.frames import frames_of
from memir.analysis.liveness import Timeline, timeline
from memir.analysis.peak import Piece, peak
from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Program
from memir.ir.declarations import member_count
from memir.ir.unroll import bound_header
from memir.one_rank import run_on
from memir.parallel.every_stage import of_each_stage
from memir.pipeline import PassError, Pipeline
from memir.planner.programs import Programs

Trace = Callable[[int, int], tuple[Program, Mapping[str, int]]]  # (micro-batch, accumulation) -> the step, its fixed symbols
SMALL = 1  # a batch of one is another program; all others share one
SOME = 2


@dataclass(slots=True)
class Variant:
    """The programs of the ranks that differ, one for each stage of a pipeline, and what is read off them.

    `fixed`: values of their symbols but B and S. `failure`: why there is none.
    """

    text: str
    programs: tuple[Program, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    lines: tuple[Timeline, ...] = ()
    costs: Costs | None = None  # of the only rank
    failure: str = ""
    refused: bool = False  # the failure is one of the layout, at whatever batch: something does not divide
    instead: Callable[[], Variant] | None = None  # the same with degrees as numbers
    _headers: dict[int, tuple[Program, ...]] = field(default_factory=dict)  # S -> dims and domains over B
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict)  # S -> of all ranks' peaks
    _costs: dict[int, Costs] = field(default_factory=dict)  # S -> over B

    def peak(self, batch: int, seq: int) -> tuple[int, str]:
        """Requested bytes of the rank that takes the most, and the phase of its peak.

        UsageError outside of the programs' domain. InconclusiveError where it is not told as a formula.
        """
        if not self.programs:
            raise UsageError(self.failure)
        if seq not in self._headers:
            self._headers[seq] = tuple(self._header(program, seq) for program in self.programs)
        env = {"B": batch}
        for header in self._headers[seq]:
            check(env, header)
        found, place = -1, ""
        for piece in self.pieces(seq):
            nbytes = piece.size.evaluate(env)
            if nbytes > found:
                found, place = nbytes, piece.place.phase
        return found, place

    def _known(self, program: Program, seq: int) -> dict[str, int]:
        """The values of all symbols of a program but B."""
        return {name: value for name, value in {**self.fixed, "S": seq}.items() if name in program.dims}

    def _header(self, program: Program, seq: int) -> Program:
        """What is left of the program's domain at one S. UsageError where it does not hold there."""
        header = bound_header(program, self._known(program, seq))
        return replace(header, storages=(), values=(), phases=())

    def host(self, seq: int) -> int:
        """Requested bytes in the host's memory between steps, of the rank that has the most there."""
        found = [0]
        for program in self.programs:
            env = {**self.fixed, "S": seq}
            held = (s for s in program.storages if s.live_in and s.device == "host" and "B" not in s.nbytes.symbols())
            found.append(sum(s.nbytes.evaluate(env) * member_count(s.name).evaluate(env) for s in held))
        return max(found)

    def pieces(self, seq: int) -> tuple[Piece, ...]:
        """The polynomials over B that the peak is the largest of."""
        if seq not in self._pieces:
            try:
                self._pieces[seq] = tuple(piece for rank in range(len(self.programs)) for piece in self._at(rank, seq))
            except ValueError as error:  # a shard's bytes, over degrees that are symbols
                if self.instead is None:
                    raise InconclusiveError(str(error)) from error
                self._pieces[seq] = self.instead().pieces(seq)
        return self._pieces[seq]

    def _at(self, rank: int, seq: int) -> list[Piece]:
        """The pieces of a rank's peak over B, in the order of their places: of equal ones the first is where the peak is."""
        program = self.programs[rank]
        known = self._known(program, seq)
        line = self.lines[rank].bind(known)
        found = peak(bound_header(program, known), line=line, by_phase=False)
        return sorted(found.total.pieces, key=lambda piece: piece.place.index)

    def parts(self, batch: int, seq: int, device: Device, layers: int, microbatches: int) -> Parts:
        """The seconds of computing one of its micro-batches, of which it has so many."""
        if self.costs is None:
            raise UsageError(self.failure)
        return self._costs_at(seq).at({"B": batch, "S": seq, **self.fixed}, device, layers, microbatches)

    def ready(self, seq: int) -> None:
        """Reads everything off the programs that any batch needs at this length."""
        if self.programs:
            self.pieces(seq)
        if self.costs is not None:
            self._costs_at(seq)

    def _costs_at(self, seq: int) -> Costs:
        assert self.costs is not None
        if seq not in self._costs:
            try:
                self._costs[seq] = self.costs.bound({"S": seq, **self.fixed})
            except ValueError:  # a shard of a batch that is not known yet
                self._costs[seq] = self.costs
        return self._costs[seq]


def kind_of(batch: int, accumulate: int) -> tuple[int, int]:
    """The micro-batch and accumulation that are traced for these: all that are more than one are alike."""
    return min(batch, SOME), min(accumulate, SOME)


class Variants:
    """The variants of one traced step, each made once. `trace` gives the step for a micro-batch and an accumulation."""

    def __init__(self, trace: Trace, progress: Callable[[str], None]) -> None:
        self._trace, self._progress = trace, progress
        self._steps: dict[tuple[int, int], Programs] = {}
        self._made: dict[tuple[str, int, int], Variant] = {}
        self._read: dict[tuple[int, ...], tuple[tuple[Program, ...], tuple[Timeline, ...], Costs | None]] = {}

    @property
    def count(self) -> int:
        """How many were made."""
        return len(self._made)

    def step(self, batch: int, accumulate: int) -> tuple[Program, Mapping[str, int]]:
        """The traced step that holds for them: a batch of 1 has its own, and so has more than one micro-batch."""
        found = self._programs(kind_of(batch, accumulate))
        return found.program, found.depth

    def _programs(self, kind: tuple[int, int]) -> Programs:
        if kind not in self._steps:
            more = (" a batch of 1" if kind[0] == SMALL else "") + (", accumulating" if kind[1] > 1 else "")
            self._progress(f"tracing{more}")
            self._steps[kind] = Programs(*self._trace(*kind))
        return self._steps[kind]

    def get(self, text: str, batch: int, accumulate: int) -> Variant:
        """The step after the passes of `text`."""
        key = (text, *kind_of(batch, accumulate))
        if key not in self._made:
            programs = self._programs(key[1:])
            self._progress(f"{text or 'one gpu'}")
            self._made[key] = self._make(text, programs)
        return self._made[key]

    def _make(self, text: str, programs: Programs, *, symbols: bool = True) -> Variant:
        """The rows that are printed are verified later."""
        try:
            made = programs.made(text, symbols=symbols)
            key = tuple(id(program) for program in made.programs)
            if key not in self._read:
                lines = tuple(timeline(program) for program in made.programs)
                costs = Costs(work_of(made.programs[0])) if len(made.programs) == 1 else None
                self._read[key] = made.programs, lines, costs
            _, lines, costs = self._read[key]
            instead = (lambda: self._make(text, programs, symbols=False)) if made.degrees else None
            return Variant(text, made.programs, {**programs.depth, **dict(made.degrees)}, lines, costs, instead=instead)
        except (UsageError, InconclusiveError) as error:
            return Variant(text, failure=_said(error), refused=isinstance(error, UsageError))
        except PassError as error:
            return Variant(text, failure=f"a bug of memir: {error.message}")


def rewritten(text: str, program: Program, fixed: Mapping[str, int]) -> tuple[Program, ...]:
    """The step of each rank that differs, after the passes; with all layers one by one where they do not repeat afterwards.

    Errors are those of the passes.
    """
    stages = of_each_stage(Pipeline.parse(text).passes)
    return tuple(run_on(Pipeline(s), program, fixed, beyond=InconclusiveError)[0] for s in stages)


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
