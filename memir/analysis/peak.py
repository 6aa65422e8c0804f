"""The peak as mathematics: the maximum over all program points, as a few polynomials with the place of each.

Every point's live bytes are a polynomial in the symbols. Points that another one dominates on the whole domain fall away, and
so do those that provably never attain the maximum; what remains is exact: the peak is their Max, everywhere in the domain.
`memir.analysis.regions` has the borders between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.domain import Range, program_ranges
from memir.analysis.dominance import MAX_BOXES, Box, Comparer, attained, prune
from memir.analysis.liveness import Step, Timeline, basis_of, evaluate_points, timeline
from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.size import Monomial, Size

START = -1  # the place before the first operator
LARGE = 2**20  # where pieces are compared for their order


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a program: an operator while it runs, or the step's start (`index` -1, the rest empty)."""

    phase: str = ""
    index: int = START  # of the operator, counted from 0 over all phases
    opcode: str = ""
    path: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """One polynomial of a maximum, in bytes, and the first place whose live bytes it is.

    `witness` is a point of the domain at which it attains the maximum; None: neither found nor refuted.
    """

    size: Size
    place: Place
    witness: tuple[tuple[str, int], ...] | None


@dataclass(frozen=True, slots=True)
class Envelope:
    """The maximum of some program points: exact on the domain, pieces ordered from small symbols to large."""

    pieces: tuple[Piece, ...]
    dims: tuple[str, ...]
    domain: tuple[tuple[str, Range], ...]  # the ranges that were used

    def evaluate(self, env: Mapping[str, int]) -> tuple[int, Piece]:
        """Bytes at `env`, and the piece that attains them (of equals the one whose place comes first).

        UsageError if a symbol has no value, or one for which the envelope does not hold.
        """
        _check_inside(self.domain, env)
        basis = basis_of([p.size for p in self.pieces])
        numbers = evaluate_points(basis, [coefficients(p.size, basis) for p in self.pieces], env)
        best = max(numbers)
        winners = [piece for piece, number in zip(self.pieces, numbers, strict=True) if number == best]
        return best, min(winners, key=lambda piece: piece.place.index)


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of a step: over everything, in each phase (in order; if asked), and the bytes that stay alive between steps."""

    total: Envelope
    phases: tuple[tuple[str, Envelope], ...]
    resident: Size

    def evaluate(self, env: Mapping[str, int]) -> tuple[int, Piece]:
        """Bytes at `env`, and the piece that attains them."""
        return self.total.evaluate(env)


class Front:
    """The points of a program that no other one dominates everywhere: their maximum is the peak, too.

    Which of them attain it somewhere is not asked, which `peak` takes most of its time for: for who wants numbers only.
    """

    def __init__(self, program: Program, line: Timeline) -> None:
        self._box, comparer = _box(program, line), Comparer(line.basis)
        everything: dict[int, Place] = {line.start: Place()}
        for index, (step, point) in enumerate(zip(line.steps, line.running, strict=True)):
            if point not in everything:
                everything[point] = _place(index, step)
        kept = _prune(line, comparer, self._box, everything)
        self._pieces = [Piece(line.size(point), place, None) for point, place in kept.items()]
        used = [k for k in range(len(line.basis)) if any(line.points[point][k] for point in kept)]
        self._basis = [line.basis[k] for k in used]
        self._vectors = [tuple([line.points[point][k] for k in used]) for point in kept]

    def evaluate(self, env: Mapping[str, int]) -> tuple[int, Piece]:
        """Bytes at `env`, and the piece that attains them (of equals the one whose place comes first).

        Errors are those of `Envelope.evaluate`.
        """
        _check_inside(self._box, env)
        numbers = evaluate_points(self._basis, self._vectors, env)
        best = max(numbers)
        return best, self._pieces[numbers.index(best)]  # they are in the order of their places


def peak(
    program: Program, *, line: Timeline | None = None, env: Mapping[str, int] | None = None, by_phase: bool = True
) -> Peak:
    """The exact symbolic peak. `line`: the program's timeline if it is there already; `env`: a point that is asked about;
    `by_phase`: whether the peak of each phase is asked for, too.

    Errors are those of `timeline`.
    """
    line = line or timeline(program)
    first: dict[str, dict[int, Place]] = {}
    for phase in program.phases:
        first.setdefault(phase.name, {})
    for index, (step, point) in enumerate(zip(line.steps, line.running, strict=True)):
        seen = first[step.phase.name]
        if point not in seen:
            seen[point] = _place(index, step)
    box, comparer = _box(program, line), Comparer(line.basis)
    asked = [env] if env is not None else []
    phases, everything = [], {line.start: Place()}
    for name, points in first.items():
        if not points:
            continue
        kept = _prune(line, comparer, box, points)
        if by_phase:
            phases.append((name, _envelope(line, comparer, box, program.dims, kept, asked, MAX_BOXES // 8)))
        for point, place in kept.items():
            if point not in everything or place.index < everything[point].index:
                everything[point] = place
    total = _envelope(line, comparer, box, program.dims, _prune(line, comparer, box, everything), asked, MAX_BOXES)
    return Peak(total, tuple(phases), line.size(line.start))


def _place(index: int, step: Step) -> Place:
    op = step.op
    return Place(step.phase.name, index, op.opcode, op.path, op.source)


def _box(program: Program, line: Timeline) -> Box:
    """The ranges of all symbols that the points have."""
    allowed = program_ranges(program)
    for size in (Size(((m, 1),)) for m in line.basis):
        for symbol in sorted(size.symbols()):
            allowed.setdefault(symbol, Range())
    return tuple(allowed.items())


def _check_inside(domain: Box, env: Mapping[str, int]) -> None:
    for name, allowed in domain:
        if name in env and env[name] not in allowed:
            end = f"{name} >= {allowed.low}" + (f", {name} <= {allowed.high}" if allowed.high is not None else "")
            raise UsageError(f"the peak at {name}={env[name]} is not known: the program is valid for {end}")


def _prune(line: Timeline, comparer: Comparer, box: Box, points: Mapping[int, Place]) -> dict[int, Place]:
    order = sorted(points, key=lambda point: points[point].index)
    kept = prune([line.points[point] for point in order], comparer, box)
    return {order[i]: points[order[i]] for i in kept}


def _envelope(
    line: Timeline,
    comparer: Comparer,
    box: Box,
    dims: tuple[str, ...],
    points: Mapping[int, Place],
    asked: Iterable[Mapping[str, int]],
    max_boxes: int,
) -> Envelope:
    order = list(points)
    boxes = max_boxes // 4 if comparer.has_generators else max_boxes  # a box with generators costs more
    needed = attained([line.points[point] for point in order], comparer, box, asked, boxes)
    pieces = []
    for i, witness in needed.items():
        found = None if witness is None else tuple((name, witness[name]) for name, _ in box)
        pieces.append(Piece(line.size(order[i]), points[order[i]], found))
    far = {name: allowed.high or max(LARGE, allowed.low) for name, allowed in box}
    pieces.sort(key=lambda piece: (piece.size.fraction(far), piece.place.index))
    return Envelope(tuple(pieces), dims, box)


def coefficients(size: Size, basis: Sequence[Monomial]) -> tuple[int, ...]:
    """A size as its coefficients over a basis that has all its monomials."""
    terms = dict(size.terms)
    return tuple(terms.get(monomial, 0) for monomial in basis)
