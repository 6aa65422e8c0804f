"""A quantity of a step (its peak, what autograd keeps, ...) as pieces over the shown symbols, each with its terms and place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memir.analysis.domain import Range, domain_text, program_ranges
from memir.analysis.dominance import Comparer, prune
from memir.analysis.frames import Frames, frames_of
from memir.analysis.liveness import LiveRange, Timeline
from memir.analysis.peak import START, Envelope, Place, peak
from memir.analysis.regions import regions
from memir.derivation.bounds import CUT, Cuts, by_layers
from memir.derivation.step import Shown
from memir.derivation.terms import Inventory, Row, Term, rows_of_point, terms_of
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Repeat
from memir.ir.domain import bind_domain
from memir.ir.size import ZERO, Size
from memir.ir.unroll import bound_header

QUANTITIES = ("peak", "steady", "activations", "layer", "parameters", "gradients", "states", "logits")
TITLES = {
    "peak": "the most that is alive at any operator of one training step",
    "steady": "what is alive between two steps",
    "activations": "what is kept at the end of the forward for the backward",
    "layer": "what one more layer keeps for the backward",
    "parameters": "the parameters",
    "gradients": "the gradients at the end of the backward",
    "states": "parameters, gradients and the optimizer's state",
    "logits": "the most that tensors over tokens and vocabulary take together",
}
STATES = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True)
class Part:
    """One polynomial of a quantity: at the target's widths and depth the quantity is this one wherever `when` holds."""

    size: Size  # bytes, or elements
    terms: tuple[Term, ...]
    place: Place | None  # None for what is a sum, not a point
    when: str  # over B and S, for sympy; "True" where it is the only one
    words: str  # for people; may be empty
    example: str  # a point where it is the quantity, "B=2, S=2048"; empty where none is known


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity at the target's widths: the maximum of its parts. `every` is exact at all widths of the domain."""

    name: str  # as --of has it
    title: str
    parts: tuple[Part, ...]
    every: tuple[Size, ...]
    value: int  # at the target's point
    domain: tuple[str, ...]
    shown: Shown  # the step that it is of
    note: str = ""
    cuts: Cuts | None = None  # where the cut is a symbol: those for which it holds


class Derivation:
    """The quantities of one shown step. `everywhere` asks for pieces that hold at all widths, which takes seconds."""

    def __init__(self, shown: Shown, *, everywhere: bool = False, elements: bool = False) -> None:
        self.shown, self.program, self.env = shown, shown.program, shown.env | shown.hidden
        self.everywhere, self.elements = everywhere, elements

    @cached_property
    def _frames(self) -> tuple[Frames, Timeline]:
        return frames_of(self.program)

    def quantity(self, name: str) -> Quantity:
        """One of QUANTITIES, or `phase:NAME`. UsageError for another word, or a phase that the step does not have."""
        if name in ("peak", "logits") or name.startswith("phase:"):
            return self._maximum(name)
        if name not in QUANTITIES:
            phases = ", ".join(f"phase:{phase.name}" for phase in self.program.phases)
            raise UsageError(f"--of: {name!r} is no quantity", hint=f"one of {', '.join(QUANTITIES)}, {phases}")
        return self._sum(name)

    # -- maxima

    def _maximum(self, name: str) -> Quantity:
        frames, line, program = *self._frames, self.program
        if name == "logits":
            program = _only(self.program, self._of_logits)
            frames, line = frames_of(program)
        wanted = name.partition(":")[2]
        envelope = self._at_widths(line, wanted)
        inventory = Inventory(frames)
        parts = []
        for region in regions(envelope):
            place = region.piece.place
            size = line.size(line.start if place.index == START else line.running[place.index])
            rows = rows_of_point(inventory, place.index, size)
            witness = region.piece.witness
            example = "" if witness is None else ", ".join(f"{name}={value}" for name, value in witness)
            parts.append(self._part(rows, place, region.when, region.words, example))
        every: Sequence[Size] = [part.size for part in parts]
        if self.everywhere and self.shown.widths and not self.elements:
            every = _undominated(self.shown.header, line, wanted)
        title = TITLES.get(name, f"the most that is alive at any operator of the {wanted}")
        return self._quantity(name, title, parts, every)

    def _at_widths(self, line: Timeline, phase: str) -> Envelope:
        program, widths = self.shown.header, self.shown.widths
        point = {name: value for name, value in self.env.items() if name not in widths}
        bound = line.bind(widths) if widths else line
        return self._envelope(peak(bound_header(program, widths), line=bound, env=point, by_phase=bool(phase)), phase)

    def _envelope(self, found: object, phase: str) -> Envelope:
        if not phase:
            return found.total  # type: ignore[attr-defined,no-any-return]
        phases: dict[str, Envelope] = dict(found.phases)  # type: ignore[attr-defined]
        if phase not in phases:
            raise UsageError(f"--of: the step has no phase {phase!r}", hint=f"it has: {', '.join(phases)}")
        return phases[phase]

    def _of_logits(self, size: Size) -> bool:
        return {"V"} <= size.symbols() and bool({"B", "S"} & size.symbols())

    # -- sums

    def _sum(self, name: str) -> Quantity:
        frames, _ = self._frames
        inventory = Inventory(frames)
        note = ""
        if name == "steady":
            rows = inventory.at(START)
        elif name == "parameters":
            rows = inventory.at(START, lambda live: live.storage.kind == Kind.PARAMETER)
        elif name in ("activations", "layer"):
            last = self._last("forward")
            rows = inventory.after(last, _is_kept)
            if name == "layer":
                step = frames.axes[0][2] if frames.axes else 1
                note = "" if step < 2 else f"a unit of {step} layers that repeats"
                if not frames.symbol:
                    raise InconclusiveError("--of layer: the layers were not folded, so none stands for the others")
                rows = inventory.each_more(last, _is_kept)
        else:
            kinds = STATES if name == "states" else (Kind.GRADIENT,)
            rows = inventory.after(self._last("backward"), lambda live: live.storage.kind in kinds)
        part = self._part(rows)
        return self._quantity(name, TITLES[name], [part], [part.size], note)

    def _last(self, phase: str) -> int:
        """The last step of the first phase of that name."""
        position, found = 0, -1
        for part in self._frames[0].program.phases:  # in which Repeats whose count is a number are written out
            length = sum(1 if isinstance(op, Op) else 2 * len(op.body) for op in part.ops if isinstance(op, Op | Repeat))
            position += length
            if part.name.endswith(phase) and found < 0:
                found = position - 1
        if found < 0:
            raise UsageError(f"--of: the step has no {phase}", hint="it needs  --mode train")
        return found

    def _part(
        self, rows: Sequence[Row], place: Place | None = None, when: str = "True", words: str = "", example: str = ""
    ) -> Part:
        if self.elements:
            rows = [replace(row, size=row.elements) for row in rows]
        hidden = self.shown.hidden
        if hidden:
            rows = [replace(row, size=row.size.substitute(hidden), count=row.count.substitute(hidden)) for row in rows]
        size = sum((row.size for row in rows), start=ZERO)
        shown = [replace(row, size=by_layers(row.size)) for row in rows] if CUT in size.symbols() else rows
        point = self.shown.point
        return Part(size, terms_of(shown, lambda term: term.evaluate(point)), place, when, words, example)

    def _quantity(self, name: str, title: str, parts: Sequence[Part], every: Sequence[Size], note: str = "") -> Quantity:
        value = max(part.size.evaluate(self.env) for part in parts)
        hidden = self.shown.hidden
        conditions = bind_domain(self.shown.header.domain, hidden, tuple(self.shown.env))
        domain = domain_text(tuple(self.shown.env), conditions)
        whole = tuple(dict.fromkeys(size.substitute(hidden) for size in every))
        return Quantity(name, title, tuple(parts), whole, value, domain, self.shown, note)


def _undominated(program: Program, line: Timeline, phase: str) -> list[Size]:
    """The live bytes of every point (of a phase) that no other point's are at least as large as on the whole domain.

    Their maximum is exact everywhere. Which of them are the largest somewhere is not decided: over so many symbols cutting the
    domain into boxes, as `memir.analysis.peak` does over two or three, takes too long.
    """
    steps = zip(line.steps, line.running, strict=True)
    points = dict.fromkeys(point for step, point in steps if not phase or step.phase.name == phase)
    if not phase:
        points.setdefault(line.start)
    allowed = program_ranges(program)
    for symbol in sorted({symbol for monomial in line.basis for symbol in Size(((monomial, 1),)).symbols()}):
        allowed.setdefault(symbol, Range())
    order = list(points)
    kept = prune([line.points[point] for point in order], Comparer(line.basis), tuple(allowed.items()))
    return [line.size(order[place]) for place in kept]


def _is_kept(live: LiveRange) -> bool:
    """Kept for the backward: an activation that this step made."""
    return live.storage.kind == Kind.ACTIVATION and not live.storage.live_in


def _only(program: Program, keep: Callable[[Size], bool]) -> Program:
    """The program in which only some storages have bytes."""

    def op(one: Op | Repeat) -> Op | Repeat:
        return replace(one, body=tuple(map(op, one.body))) if isinstance(one, Repeat) else replace(one, scratch=ZERO)

    return replace(
        program,
        storages=tuple(s if keep(s.nbytes) else replace(s, nbytes=ZERO) for s in program.storages),
        phases=tuple(replace(phase, ops=tuple(map(op, phase.ops))) for phase in program.phases),
    )
