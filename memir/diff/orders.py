"""The order of growth of a peak: which products of symbols it is bounded by, and which of them are new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from memir.analysis.peak import Envelope
from memir.ir.size import Monomial, Size
from memir.ir.symbolic import formula_text

Powers = tuple[tuple[str, int], ...]  # symbols and their exponents, sorted by name


@dataclass(frozen=True, slots=True)
class Order:
    """A product of symbols that only one of two peaks grows with."""

    is_new: bool  # the head's; else the base's
    product: str  # "B*S**2"
    term: str  # with its coefficient in bytes, "16*B*S**2"
    nbytes: int  # the term at the asked point

    @property
    def words(self) -> str:
        """`peak gained a B*S**2 term, 16*B*S**2 bytes`."""
        return f"the peak {'gained' if self.is_new else 'lost'} a {self.product} term: {self.term} bytes"


def powers(monomial: Monomial) -> Powers:
    """The order of growth of a monomial: exponents of its symbols, where `ceil(a/b)` and its kin grow as `a`."""
    found: dict[str, int] = {}
    for atom, exponent in monomial:
        if isinstance(atom, str):
            found[atom] = found.get(atom, 0) + exponent
            continue
        inner = [
            dict(powers(m)) for size in ((atom.a, atom.b) if atom.op in ("max", "min") else (atom.a,)) for m, _ in size.terms
        ]
        for name in {name for part in inner for name in part}:
            found[name] = found.get(name, 0) + exponent * max(part.get(name, 0) for part in inner)
    return tuple(sorted((name, e) for name, e in found.items() if e))


def within(small: Powers, large: Powers) -> bool:
    """Whether `small` grows at most as `large`."""
    allowed = dict(large)
    return all(exponent <= allowed.get(name, 0) for name, exponent in small)


def leading(sizes: Iterable[Size]) -> tuple[Powers, ...]:
    """The orders of growth of a sum or maximum that no other of its terms covers, sorted."""
    found = {powers(monomial) for size in sizes for monomial, _ in size.terms} - {()}
    return tuple(sorted(p for p in found if not any(p != q and within(p, q) for q in found)))


def product_text(found: Powers) -> str:
    """`B*S**2`; `1` for a constant."""
    return "*".join(name if e == 1 else f"{name}**{e}" for name, e in found) or "1"


def gained(base: Envelope, head: Envelope, env: Mapping[str, int]) -> tuple[Order, ...]:
    """Terms of one peak that the other has nothing to compare with; the head's first."""
    ours, theirs = [p.size for p in base.pieces], [p.size for p in head.pieces]
    return (*_only(theirs, ours, env, is_new=True), *_only(ours, theirs, env, is_new=False))


def _only(sizes: list[Size], others: list[Size], env: Mapping[str, int], *, is_new: bool) -> Iterable[Order]:
    known = leading(others)
    for found in leading(sizes):
        if any(within(found, other) for other in known):
            continue
        terms = [Size([t for t in size.terms if powers(t[0]) == found]) for size in sizes]
        # where the other peak grows with none of it, the largest coefficient is what counts
        term = max(terms, key=lambda t: (t.fraction(env), t.text()))
        yield Order(is_new, product_text(found), formula_text(term), int(term.fraction(env)))


def degree(found: Powers) -> int:
    """The sum of exponents."""
    return sum(e for _, e in found)


def scale(found: Powers, env: Mapping[str, int]) -> int:
    """The product at a point."""
    return prod(env.get(name, 1) ** e for name, e in found)
