"""A quantity as a Python function without imports, and as sympy's srepr."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memir.derivation.derive import Quantity
from memir.derivation.layout import conditions
from memir.derivation.step import MEANINGS, ORDER, Shown
from memir.derivation.write_text import heading
from memir.ir.size import Gen, Monomial, Size


def to_python(shown: Shown, quantities: Sequence[Quantity], unit: str) -> str:
    """A module of functions, one a quantity, that need nothing: whole numbers in, whole numbers out."""
    lines = [f'"""{heading(shown)}', "", f"Written by memir formula; {unit}, exact for whole numbers where"]
    lines += [f"    {text}" for text in conditions(quantities[0].domain)]
    lines += [f"{symbol} is {text}." for symbol, text in shown.ties]
    lines += ['"""', ""]
    arguments = ", ".join(shown.env)
    for quantity in quantities:
        name = _identifier(quantity.name)
        lines += ["", f"def {name}({arguments}):", f'    """{_sentence(quantity.title)}.', ""]
        lines += [f"    {symbol}: {MEANINGS.get(symbol, 'a symbol')}" for symbol in shown.env]
        lines += ['    """']
        texts = [python_text(size) for size in quantity.every]
        if len(texts) == 1:
            lines.append(f"    return {texts[0]}")
        else:
            lines += ["    return max(", *(f"        {text}," for text in texts), "    )"]
        lines.append("")
    lines += ["", 'if __name__ == "__main__":']
    values = ", ".join(f"{name}={value}" for name, value in shown.env.items())
    for quantity in quantities:
        name = _identifier(quantity.name)
        lines.append(f"    print({name!r}, {name}({values}))")
    return "\n".join(lines) + "\n"


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
    """One line a quantity: its name, `=`, and sympy's srepr of it, which `sympy.sympify` and `eval` read."""
    import sympy

    from memir.ir.symbolic import to_sympy

    lines = []
    for quantity in quantities:
        sizes = [to_sympy(size) for size in quantity.every]
        whole = sizes[0] if len(sizes) == 1 else sympy.Max(*sizes, evaluate=False)
        lines.append(f"{quantity.name} = {sympy.srepr(whole)}")
    return "\n".join(lines) + "\n"
