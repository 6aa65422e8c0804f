"""Two steps side by side: what each takes at its peak, the difference term by term, and new kinds of terms in words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from memir.analysis.words import Unit
from memir.derivation.derive import Derivation, Part
from memir.derivation.layout import plain_style, size_text
from memir.derivation.step import Shown
from memir.derivation.terms import Term
from memir.derivation.write_text import WIDTH, heading, origins, place_text, shortened_origins
from memir.ir.size import Monomial, Size


def to_difference(first: Derivation, second: Derivation, names: Sequence[str], unit: str) -> str:
    """The second less the first, at the second's own point where symbols are numbers."""
    a, b = first.shown, second.shown
    lines = [f"first   {heading(a)}", f"second  {heading(b)}", ""]
    for name in names:
        ours, theirs = (_main(derivation, name) for derivation in (first, second))
        env = {**a.env, **b.env}
        difference = theirs.size - ours.size
        value = difference.fraction(env)
        lines.append(f"{name}, second - first, in {unit}   ({_amount(int(value), unit)} at {_at(env)})")
        text = size_text(difference, env, plain_style())
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
        for side, part in (("first", ours), ("second", theirs)):
            where = place_text(part)
            lines += [f"  {side}: {where}"] if where else []
        lines += _table(difference, ours, theirs, env)
        lines += [f"  {sentence}" for sentence in _sentences(ours, theirs)]
        lines.append("")
    meanings = a.meanings | b.meanings
    lines.append("symbols: " + ", ".join(f"{n} {meanings.get(n, '')} ({_both(a, b, n)})" for n in {**a.env, **b.env}))
    lines += [f"{symbol} = {text} in both" for symbol, text in a.ties if (symbol, text) in b.ties]
    for side, one, other in (("first", a, b), ("second", b, a)):
        lines += [f"{symbol} = {text} in the {side}" for symbol, text in one.ties if (symbol, text) not in other.ties]
    return "\n".join(lines) + "\n"


def _main(derivation: Derivation, name: str) -> Part:
    """The part that is the quantity at the target's own point."""
    parts = derivation.quantity(name).parts
    return max(parts, key=lambda part: part.size.evaluate(derivation.env))


def _amount(nbytes: int, unit: str) -> str:
    if unit != "bytes":
        return f"{nbytes:+,}"
    return ("-" if nbytes < 0 else "+") + Unit.of(abs(nbytes)).text(abs(nbytes))


def _at(env: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in env.items())


def _both(a: Shown, b: Shown, name: str) -> str:
    values = [str(shown.env[name]) for shown in (a, b) if name in shown.env]
    return values[0] if len(set(values)) == 1 else " and ".join(values)


def _table(difference: Size, ours: Part, theirs: Part, env: Mapping[str, int]) -> list[str]:
    style = plain_style()
    left, right = _by_monomial(ours), _by_monomial(theirs)
    terms = sorted(difference.terms, key=lambda term: -abs(Size((term,)).fraction(env)))
    rows = [(size_text(Size((term,)), env, style), _why(left.get(term[0]), right.get(term[0]))) for term in terms]
    width = max((len(name) for name, _ in rows), default=0)
    return [f"    {name.ljust(width)}  {why}" for name, why in rows]


def _why(ours: Term | None, theirs: Term | None) -> str:
    """What makes the term on each side that has it, less what is alike on both."""
    left, right = (set(origins(term)) if term is not None else set() for term in (ours, theirs))
    parts = []
    for sign, term, other in (("+", theirs, left), ("-", ours, right)):
        made = [origin for origin in (origins(term) if term is not None else []) if origin not in other]
        if made:
            parts.append(f"{sign} {shortened_origins(made, WIDTH)}")
    return "   ".join(parts)


def _by_monomial(part: Part) -> dict[Monomial, Term]:
    return {term.monomial: term for term in part.terms}


def _sentences(ours: Part, theirs: Part) -> list[str]:
    """A kind of growth that only one side has, in words."""
    found = []
    for symbol, words in (
        ("S", "the square of the sequence length"),
        ("h", "the square of the hidden size"),
        ("L", "the depth"),
    ):
        least = 2 if symbol != "L" else 1
        sides = [_growing(part, symbol, least) for part in (ours, theirs)]
        for side, mine, other in (("second", sides[1], sides[0]), ("first", sides[0], sides[1])):
            if mine and not other:
                term = mine[0]
                text = size_text(term.size, dict.fromkeys(term.size.symbols(), 1), plain_style())
                made = shortened_origins(origins(term), WIDTH)
                found.append(f"only the {side} grows with {words}: {text} ({made})")
    return found


def _growing(part: Part, symbol: str, least: int) -> list[Term]:
    return [term for term in part.terms if dict(term.monomial).get(symbol, 0) >= least and dict(term.monomial).get("B", 0)]
