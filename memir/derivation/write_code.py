"""A quantity as a Python function without imports, and as sympy's srepr."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memir.derivation.bounds import CUT, Cuts
from memir.derivation.derive import Quantity
from memir.derivation.layout import conditions
from memir.derivation.step import ORDER, Shown
from memir.derivation.write_text import common_domain, heading
from memir.ir.size import Gen, Monomial, Size

if TYPE_CHECKING:
    from sympy.logic.boolalg import Boolean


def to_python(shown: Shown, quantities: Sequence[Quantity], unit: str) -> str:
    """A module of functions, one a quantity, that need nothing: whole numbers in, whole numbers out."""
    lines = [f'"""{heading(shown)}', "", f"Written by memir formula; {unit}, exact for whole numbers where"]
    lines += [f"    {text}" for text in conditions(common_domain(quantities))]
    lines += [f"{symbol} is {text}." for symbol, text in shown.ties]
    lines += ['"""', ""]
    arguments = ", ".join(shown.env)
    for name, group in _by_name(quantities):
        lines += ["", f"def {_identifier(name)}({arguments}):", f'    """{_sentence(group[0].title)}.', ""]
        lines += [f"    {symbol}: {shown.meanings.get(symbol, 'a symbol')}" for symbol in shown.env]
        lines += ['    """']
        for quantity in group:
            lines += [f"    if {quantity.cuts.code()}:"] if quantity.cuts is not None else []
            lines += _returned(quantity, "    " if quantity.cuts is None else "        ")
        lines += [f'    raise ValueError("the formula is not for {CUT} =", {CUT})'] if group[0].cuts is not None else []
        lines.append("")
    lines += ["", 'if __name__ == "__main__":']
    values = ", ".join(f"{name}={value}" for name, value in shown.env.items())
    for name in map(_identifier, dict(_by_name(quantities))):
        lines.append(f"    print({name!r}, {name}({values}))")
    return "\n".join(lines) + "\n"


def _by_name(quantities: Sequence[Quantity]) -> list[tuple[str, list[Quantity]]]:
    """Each quantity with its ranges of the cut, or alone."""
    found: dict[str, list[Quantity]] = {}
    for quantity in quantities:
        found.setdefault(quantity.name, []).append(quantity)
    return list(found.items())


def _returned(quantity: Quantity, indent: str) -> list[str]:
    texts = [python_text(size) for size in quantity.every]
    if len(texts) == 1:
        return [f"{indent}return {texts[0]}"]
    return [f"{indent}return max(", *(f"{indent}    {text}," for text in texts), f"{indent})"]


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def python_text(size: Size) -> str:
    """A size with Python's operators; a term with divisors is a whole number where the domain holds, and is divided last."""
    if not size.terms:
        return "0"
    parts = [("-" if c < 0 else "+", _term(monomial, abs(c))) for monomial, c in size.terms]
    sign, first = parts[0]
    return ("-" if sign == "-" else "") + first + "".join(f" {sign} {text}" for sign, text in parts[1:])


def _term(monomial: Monomial, coefficient: int) -> str:
    rank = {name: place for place, name in enumerate(ORDER)}
    factors = sorted(monomial, key=lambda f: (isinstance(f[0], Gen), rank.get(str(f[0]), 99)))
    top = [_power(a, e) for a, e in factors if e > 0]
    bottom = [_power(a, -e) for a, e in factors if e < 0]
    if coefficient != 1 or not top:
        top.insert(0, str(coefficient))
    text = "*".join(top)
    return text if not bottom else f"{text} // ({'*'.join(bottom)})" if len(bottom) > 1 else f"{text} // {bottom[0]}"


def _power(atom: str | Gen, exponent: int) -> str:
    text = atom if isinstance(atom, str) else _gen(atom)
    return text if exponent == 1 else f"{text}**{exponent}"


def _gen(gen: Gen) -> str:
    a, b = python_text(gen.a), python_text(gen.b)
    if gen.op in ("max", "min"):
        return f"{gen.op}({a}, {b})"
    return f"(-(-({a}) // ({b})))" if gen.op == "ceil" else f"(({a}) // ({b}))"


def to_sympy_text(quantities: Sequence[Quantity]) -> str:
    """One line a quantity: its name, `=`, and sympy's srepr of it, which `eval` reads; `sympy.lambdify` makes it quick."""
    import sympy

    from memir.ir.symbolic import to_sympy

    def whole(quantity: Quantity) -> str:
        """Not evaluated: sympy compares the arguments of a Max in pairs, which takes minutes."""
        sizes = [sympy.srepr(to_sympy(size)) for size in quantity.every]
        return sizes[0] if len(sizes) == 1 else f"Max({', '.join(sizes)}, evaluate=False)"

    lines = []
    for name, group in _by_name(quantities):
        pieces = [f"({whole(q)}, {sympy.srepr(_condition(q.cuts))})" for q in group if q.cuts is not None]
        text = f"Piecewise({', '.join(pieces)}, evaluate=False)" if pieces else whole(group[0])
        lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


def _condition(cuts: Cuts) -> Boolean:
    """The range of the cut for sympy."""
    import sympy

    from memir.ir.symbolic import to_sympy

    cut, low, high = (to_sympy(size) for size in (Size.of(CUT), cuts.low, cuts.high))
    if low == high:
        return sympy.Eq(cut, low, evaluate=False)
    grouped = [sympy.Eq(sympy.Mod(cut, cuts.group), cuts.place)] if cuts.group > 1 else []
    return sympy.And(sympy.Ge(cut, low), sympy.Le(cut, high), *grouped)
