"""The borders between the pieces of a peak: where each of them is the maximum, as exact conditions and in words.

A condition is text that sympy parses over the symbols; the conditions of an envelope are exclusive and cover its domain. The
words are for people: "B*S <= 3,412" where the pieces differ by one monomial only, "B*S <= about 6,477" where the other terms
move the border by less than 1 %, and else the ranges of one symbol while the others are fixed ("at B=4: S <= 2,311"), which
`along` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, prod

from memir.analysis.domain import Range
from memir.analysis.dominance import Comparer, segments
from memir.analysis.liveness import basis_of
from memir.analysis.peak import Envelope, Piece, coefficients
from memir.ir.size import Monomial, Size
from memir.ir.symbolic import formula_text

ABOUT = Fraction(1, 100)  # how much the lesser terms may move a border that is still named by its main monomial


MANY = 8  # more pieces than this are compared with the Max of the others instead of each by itself


@dataclass(frozen=True, slots=True)
class Region:
    """Where one piece is the maximum."""

    piece: Piece
    when: str  # exact, for sympy; "True" where it is the maximum everywhere
    words: str  # for people; "" where no short form exists


def maximum(envelope: Envelope) -> str:
    """The whole envelope as text that sympy parses: `Max(15385002144, 2375204*B*S + 8)`."""
    return _max([formula_text(piece.size, envelope.dims) for piece in envelope.pieces])


def _max(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"Max({', '.join(texts)})"


def regions(envelope: Envelope) -> tuple[Region, ...]:
    """Where each piece is the maximum, in the order of the pieces."""
    pieces = envelope.pieces
    if len(pieces) == 1:
        return (Region(pieces[0], "True", "everywhere"),)
    single = _single_monomial(pieces)
    lines = None if single is None else _by_monomial(envelope, single)
    if lines is not None:
        return lines
    words = _about(envelope)
    condition = _against_each if len(pieces) <= MANY else _against_maximum
    return tuple(Region(piece, condition(envelope, i), words[i]) for i, piece in enumerate(pieces))


def along(envelope: Envelope, symbol: str, env: Mapping[str, int]) -> tuple[tuple[Range, Piece], ...]:
    """The maximum along one symbol with the others as in `env`: consecutive ranges of it, each with its piece.

    Exact; empty where the pieces take turns too often to list (`segments`).
    """
    allowed = dict(envelope.domain)[symbol]
    basis = basis_of([p.size for p in envelope.pieces])
    vectors = [coefficients(p.size, basis) for p in envelope.pieces]
    fixed = {name: env[name] for name, _ in envelope.domain if name != symbol}
    found = segments(vectors, Comparer(basis), symbol, allowed, fixed)
    return tuple((within, envelope.pieces[i]) for within, i in found or ())


def range_text(name: str, within: Range, domain: Range) -> str:
    """`S <= 2,311`, `S >= 2,312`, `512 <= S <= 1,024`, `any S`; ends that are the domain's own are left out."""
    low = within.low if within.low > domain.low else None
    high = within.high if within.high != domain.high else None
    if low is None and high is None:
        return f"any {name}"
    if low is None:
        return f"{name} <= {high:,}"
    if high is None:
        return f"{name} >= {low:,}"
    return f"{name} = {low:,}" if low == high else f"{low:,} <= {name} <= {high:,}"


def _single_monomial(pieces: Sequence[Piece]) -> Monomial | None:
    """The only monomial, of symbols with positive exponents, by which the pieces differ besides a constant."""
    differing = {m for piece in pieces[1:] for m, _ in (piece.size - pieces[0].size).terms if m}
    if len(differing) != 1:
        return None
    (monomial,) = differing
    return monomial if all(isinstance(atom, str) and exponent > 0 for atom, exponent in monomial) else None


def _by_monomial(envelope: Envelope, monomial: Monomial) -> tuple[Region, ...] | None:
    """The pieces as lines over one monomial, whose upper envelope has whole-number borders."""
    name = formula_text(Size(((monomial, 1),)), envelope.dims)
    domain = dict(envelope.domain)
    ends = [(domain[str(atom)], exponent) for atom, exponent in monomial]
    low = prod(allowed.low**exponent for allowed, exponent in ends)
    high = prod((allowed.high or 0) ** exponent for allowed, exponent in ends) or None
    base = envelope.pieces[0].size
    lines = [coefficients(piece.size - base, ((), monomial)) for piece in envelope.pieces]
    allowed = Range(low, high)
    found = segments(lines, Comparer(((), ((name, 1),))), name, allowed, {})
    if found is None:
        return None
    result = []
    for within, i in found:
        bounds = [f"{name} >= {within.low}"] if within.low > low else []
        bounds += [f"{name} <= {within.high}"] if within.high != high else []
        when = " & ".join(f"({bound})" for bound in bounds) if len(bounds) > 1 else "".join(bounds) or "True"
        result.append(Region(envelope.pieces[i], when, range_text(name.replace("**", "^"), within, allowed)))
    return tuple(result)


def _against_each(envelope: Envelope, i: int) -> str:
    """Piece i is above every earlier one and not below any later one: exactly one piece's condition holds at each point."""
    parts = []
    for j, other in enumerate(envelope.pieces):
        if j == i:
            continue
        difference = envelope.pieces[i].size - other.size
        difference = difference.exact_div(gcd(*(c for _, c in difference.terms)))
        left = formula_text(Size((m, c) for m, c in difference.terms if c > 0), envelope.dims)
        right = formula_text(Size((m, -c) for m, c in difference.terms if c < 0), envelope.dims)
        parts.append(f"{left} {'>=' if j > i else '>'} {right}")
    return parts[0] if len(parts) == 1 else " & ".join(f"({part})" for part in parts)


def _against_maximum(envelope: Envelope, i: int) -> str:
    """The same condition against the Max of the earlier and of the later pieces: as exact, and short where there are many."""
    texts = [formula_text(piece.size, envelope.dims) for piece in envelope.pieces]
    parts = [f"{texts[i]} {sign} {_max(others)}" for sign, others in ((">", texts[:i]), (">=", texts[i + 1 :])) if others]
    return parts[0] if len(parts) == 1 else " & ".join(f"({part})" for part in parts)


def _about(envelope: Envelope) -> list[str]:
    """Words for the regions of pieces whose neighbours' borders lie along one monomial up to 1 %; empty where they do not."""
    pieces = envelope.pieces
    nothing = [""] * len(pieces)
    if any(piece.witness is None for piece in pieces):
        return nothing
    borders: list[int] = []
    mains: set[Monomial] = set()
    for before, after in pairwise(pieces):
        difference = after.size - before.size
        main, least, most = _border(difference)
        if not main or most - least > ABOUT * least:
            return nothing
        mains.add(main)
        borders.append(int(most))
    if len(mains) != 1 or borders != sorted(set(borders)):
        return nothing
    name = mains.pop()
    text = Size(((name, 1),)).text(envelope.dims)
    words = [f"{text} <= about {borders[0]:,}"]
    words += [f"{text} from about {a:,} to {b:,}" for a, b in pairwise(borders)]
    return [*words, f"{text} >= about {borders[-1]:,}"]


def _border(difference: Size) -> tuple[Monomial, Fraction, Fraction]:
    """The main monomial m of `difference` = a*m + (lesser terms) - c, and bounds of m where it is zero.

    Lesser terms have positive coefficients and monomials that divide m, so each lies between 0 and its coefficient times m for
    symbols of at least 1: the zero is between c/(a + lesser coefficients) and c/a. An empty monomial: not of that form.
    """
    terms = [(m, c) for m, c in difference.terms if m]
    constant = -difference.constant
    if not terms or constant <= 0 or any(c < 0 for _, c in terms):
        return (), Fraction(0), Fraction(0)
    main, leading = max(terms, key=lambda term: (sum(e for _, e in term[0]), term[1]))
    exponents = dict(main)
    for monomial, _ in terms:
        if any(not isinstance(atom, str) or not 0 < e <= exponents.get(atom, 0) for atom, e in monomial):
            return (), Fraction(0), Fraction(0)
    return main, Fraction(constant, sum(c for _, c in terms)), Fraction(constant, leading)
