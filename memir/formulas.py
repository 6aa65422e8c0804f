"""The symbolic answer as plain data: formulas that sympy parses, and where each piece of a peak holds.

Where a size (1, or a table's length) runs other operators than its neighbours, there are two programs: the exact one at the
asked point and the general one everywhere else. Their formulas are joined in cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memir.analysis.domain import domain_text, program_ranges
from memir.analysis.peak import Peak, Piece
from memir.analysis.regions import along, maximum, range_text, regions
from memir.ir.core import Program
from memir.ir.domain import widened
from memir.ir.symbolic import formula_text

MEANINGS = {"B": "sequences in a batch", "S": "tokens in a sequence", "L": "decoder layers"}


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the program. An empty `op` is the step's start."""

    phase: str
    op: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class RegionReport:
    """Where one polynomial is the peak."""

    when: str  # exact condition that sympy parses
    words: str  # for people; may be empty
    nbytes: str  # the polynomial, for sympy
    spot: Spot


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of S, with the other symbols as asked, in which one polynomial is the peak."""

    words: str  # "S <= 2,311"
    first: int  # bytes at the range's lower end
    slope: int  # bytes more for one more token there
    spot: Spot


@dataclass(frozen=True, slots=True)
class Formulas:
    """The symbolic answer; every formula is text that sympy parses."""

    peak: str
    steady: str
    regions: tuple[RegionReport, ...]
    stretches: tuple[Stretch, ...]  # along S at the asked point; empty if there is no S
    symbols: tuple[tuple[str, str], ...]  # name and meaning
    domain: tuple[str, ...]
    cases: tuple[tuple[str, str], ...] = ()  # where the asked point has a formula of its own: words and peak of each case


def formulas(program: Program, mathematics: Peak, env: Mapping[str, int]) -> Formulas:
    """The formulas of a program's peak. `env` is the asked point, along which the stretches of S run."""
    envelope = mathematics.total
    parts = tuple(
        RegionReport(r.when, r.words, formula_text(r.piece.size, program.dims), piece_spot(r.piece)) for r in regions(envelope)
    )
    stretches: list[Stretch] = []
    domain = dict(envelope.domain)
    if "S" in domain:
        for within, piece in along(envelope, "S", env):
            first, second = (piece.size.evaluate({**env, "S": within.low + more}) for more in (0, 1))
            stretches.append(Stretch(range_text("S", within, domain["S"]), first, second - first, piece_spot(piece)))
    return Formulas(
        peak=maximum(envelope),
        steady=formula_text(mathematics.resident, program.dims),
        regions=parts,
        stretches=tuple(stretches),
        symbols=tuple((name, MEANINGS.get(name, "")) for name in program.dims),
        domain=domain_text(program.dims, program.domain),
    )


def formulas_in_cases(
    program: Program, general: Program, elsewhere: Peak, mathematics: Peak, env: Mapping[str, int]
) -> Formulas:
    """Formulas of `program` (at the asked point only) and of `general` (its neighbours, with the peak `elsewhere`)."""
    fixed = {name: within.low for name, within in program_ranges(program).items() if within.low == within.high}
    return _in_cases(
        formulas(program, mathematics, env),
        formulas(general, elsewhere, _inside(general, env)),
        fixed,
        _same_formula(mathematics, elsewhere, fixed),
    )


def _inside(program: Program, env: Mapping[str, int]) -> dict[str, int]:
    """The point of the program's ranges that is nearest to `env`."""
    ranges = program_ranges(program)
    nearest = {name: max(value, ranges[name].low) if name in ranges else value for name, value in env.items()}
    return {n: v if n not in ranges or ranges[n].high is None else min(v, ranges[n].high or v) for n, v in nearest.items()}


def _same_formula(exact: Peak, general: Peak, pinned: Mapping[str, int]) -> bool:
    """Whether the general peak and resident bytes are those of the exact program where the pinned symbols have their values."""
    ours = {piece.size.substitute(pinned) for piece in general.total.pieces}
    theirs = {piece.size for piece in exact.total.pieces}
    return ours == theirs and general.resident.substitute(pinned) == exact.resident


def _in_cases(exact: Formulas, general: Formulas, pinned: Mapping[str, int], same: bool) -> Formulas:
    """Formulas that hold for both: sympy's Piecewise, the exact ones where the pinned symbols have their values."""
    domain = tuple(filter(None, (widened(text, pinned) for text in general.domain)))
    domain += tuple(text for text in exact.domain if text not in domain and text.split(" ")[0] not in pinned)
    if same:
        return replace(general, domain=domain, stretches=exact.stretches)
    here = " & ".join(f"Eq({name}, {value})" for name, value in pinned.items())
    words = ", ".join(f"{name} = {value}" for name, value in pinned.items())
    return replace(
        general,
        peak=_piecewise(exact.peak, general.peak, here),
        steady=_piecewise(exact.steady, general.steady, here),
        regions=(
            *(replace(r, when=_both(here, r.when), words=f"{words}: {r.words}" if r.words else "") for r in exact.regions),
            *(replace(r, when=_both(f"~({here})", r.when)) for r in general.regions),
        ),
        stretches=exact.stretches,
        domain=domain,
        cases=((words, exact.peak), (", ".join(general.domain), general.peak)),
    )


def _piecewise(exact: str, general: str, here: str) -> str:
    return exact if exact == general else f"Piecewise(({exact}, {here}), ({general}, True))"


def _both(here: str, when: str) -> str:
    return here if when == "True" else f"{here} & ({when})"


def piece_spot(piece: Piece) -> Spot:
    """The place of a piece of the peak."""
    place = piece.place
    return Spot(place.phase or "start", place.opcode, place.path, place.source)
