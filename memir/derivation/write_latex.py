"""A quantity as LaTeX that compiles as it is (amsmath), and as Markdown for a README."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memir.derivation.bounds import CUT
from memir.derivation.derive import Part, Quantity
from memir.derivation.layout import Style, conditions, plain_style, product_text, products, size_text
from memir.derivation.step import Shown
from memir.derivation.write_text import common_domain, heading, origins, place_text, title_of, value_text, when_text
from memir.ir.size import Gen, Size

PER_LINE = 4  # summands on a line


def latex_style() -> Style:
    """`(24 L + 10)\\, B S h`, `\\left\\lceil \\frac{S}{128} \\right\\rceil`."""

    def power(text: str, exponent: int) -> str:
        return text if exponent == 1 else f"{text}^{{{exponent}}}"

    def over(top: str, bottom: str) -> str:
        return rf"\frac{{{top}}}{{{bottom}}}"

    return Style(r"\, ", power, _gen, over)


def _gen(gen: Gen) -> str:
    a, b = (_inline(size) for size in (gen.a, gen.b))
    if gen.op in ("max", "min"):
        return rf"\{gen.op}\left({a}, {b}\right)"
    sides = (r"\lceil", r"\rceil") if gen.op == "ceil" else (r"\lfloor", r"\rfloor")
    return rf"\left{sides[0]} \frac{{{a}}}{{{b}}} \right{sides[1]}"


def _inline(size: Size) -> str:
    style = latex_style()
    env = dict.fromkeys(size.symbols(), 1)
    return size_text(size, env, style)


def to_latex(shown: Shown, quantities: Sequence[Quantity], unit: str, standalone: bool) -> str:
    """Equations, a legend of symbols, assumptions, where it is valid, versions."""
    lines: list[str] = []
    for quantity in quantities:
        lines += _equations(quantity, unit)
    lines += _legend(shown, quantities)
    body = "\n".join(lines) + "\n"
    if not standalone:
        return f"% {_comment(heading(shown))}\n% needs \\usepackage{{amsmath}}\n{body}"
    title = escaped(f"Memory of {shown.step.name}")
    return (
        "\\documentclass{article}\n\\usepackage{amsmath}\n\\usepackage[margin=2cm]{geometry}\n\\allowdisplaybreaks\n"
        f"\\title{{{title}}}\n\\date{{}}\n\\begin{{document}}\n\\maketitle\n\\noindent {escaped(heading(shown))}\n\n"
        f"{body}\\end{{document}}\n"
    )


def _comment(text: str) -> str:
    return text.replace("\n", " ")


def escaped(text: str) -> str:
    """Text for LaTeX."""
    table = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"$<$",
        ">": r"$>$",
        "*": r"$*$",
    }
    return "".join(table.get(c, "\\" + c if c in "&%$#_{}" else c) for c in text)


def symbol_of(quantity: Quantity) -> str:
    r"""`M_{\mathrm{peak}}`."""
    return rf"M_{{\text{{{escaped(quantity.name.removeprefix('phase:'))}}}}}"


def _equations(quantity: Quantity, unit: str) -> list[str]:
    name, shown = symbol_of(quantity), quantity.shown
    several = len(quantity.parts) > 1
    title = escaped(quantity.title[:1].upper() + quantity.title[1:])
    title += f", where {_math(quantity.cuts.words())}" if quantity.cuts is not None else ""
    lines = [f"\\paragraph{{{escaped(quantity.name)}}} {title}, in {unit}:"]
    lines += [f"({escaped(quantity.note)})"] if quantity.note else []
    lines.append(r"\begin{align*}")
    if several:
        names = ", ".join(f"M_{{{number}}}" for number in range(1, len(quantity.parts) + 1))
        lines.append(rf"{name} &= \max\left({names}\right) \\")
    for number, part in enumerate(quantity.parts, 1):
        left = f"M_{{{number}}}" if several else name
        lines += _aligned(left, part.size, shown, last=number == len(quantity.parts))
    lines.append(r"\end{align*}")
    if quantity.parts[0].place is not None:
        lines.append(r"\begin{itemize}")
        for number, part in enumerate(quantity.parts, 1):
            label = f"$M_{{{number}}}$" if several else f"${name}$"
            when = f", the largest {_mixed(when_text(part))}" if several else ""
            lines.append(rf"\item {label}: {escaped(place_text(part))}{when}.")
        lines.append(r"\end{itemize}")
    return lines


def _aligned(left: str, size: Size, shown: Shown, *, last: bool) -> list[str]:
    style = latex_style()
    parts = [product_text(product, style) for product in products(size, shown.point)]
    lines = []
    for start in range(0, len(parts), PER_LINE):
        chunk = parts[start : start + PER_LINE]
        text = " ".join(f"{sign} {term}" for sign, term in chunk)
        if not start:
            text = text.removeprefix("+ ")
        end = "" if last and start + PER_LINE >= len(parts) else r" \\"
        head = r"&\quad " if start else f"{left} &= "
        lines.append(head + text + end)
    return lines


def _legend(shown: Shown, quantities: Sequence[Quantity]) -> list[str]:
    lines = ["\\noindent where", r"\begin{itemize}"]
    for name, value in shown.env.items():
        lines.append(rf"\item ${name}$: {escaped(shown.meanings.get(name, ''))} ({value_text(shown, name, value)})")
    lines += [rf"\item {_math(f'{symbol} = {text}')}: {escaped(shown.meanings.get(symbol, ''))}" for symbol, text in shown.ties]
    lines.append(r"\end{itemize}")
    valid = ", ".join(_math(text) for text in conditions(common_domain(quantities)))
    lines.append(rf"\noindent Valid for {valid}.")
    if any(len(quantity.parts) > 1 for quantity in quantities):
        over = "B, S and c" if any(quantity.cuts is not None for quantity in quantities) else "B and S"
        lines.append(f"The maximum is over every point that is the largest for some {over} at the widths in parentheses.")
    lines += [rf"{escaped(text[:1].upper() + text[1:])} stays a number." for text in shown.step.numbers]
    lines += [rf"{escaped('Assumed: ' + text)}." for text in shown.step.assumptions]
    names = ", ".join(f"{name} {version}" for name, version in shown.step.versions)
    lines.append(rf"{escaped('Derived from the code with ' + names)}.")
    return lines


_CONDITION = re.compile(r"([A-Za-z][\w*^]* (?:<=|>=|=)(?= ))")
_SIGNS = (
    (" divides ", r" \mid "),
    (" <= ", r" \le "),
    (" >= ", r" \ge "),
    (" == ", " = "),
    (" % ", r" \bmod "),
    (" and ", r" \text{ and } "),
)


def _math(text: str) -> str:
    text = f"{text} "
    for sign, word in _SIGNS:
        text = text.replace(sign, word)
    text = text.rstrip()
    return "$" + text.replace("*", r"\,") + "$"


def _mixed(text: str) -> str:
    """Words with conditions in them, `where B*S <= about 4,015`, these as mathematics."""
    parts = _CONDITION.split(text)
    return "".join(_math(part) if number % 2 else escaped(part) for number, part in enumerate(parts))


def to_markdown(shown: Shown, quantities: Sequence[Quantity], unit: str) -> str:
    """Sections with formulas in code and a table of terms each."""
    style = plain_style()
    lines = [f"**{heading(shown)}**", ""]
    for quantity in quantities:
        value = f"{quantity.value:,}"
        own = "the model's own size" + ("" if quantity.cuts is None else f", {CUT}={quantity.shown.env[CUT]}")
        lines += [f"`{quantity.name}`: {title_of(quantity)}, in {unit} ({value} at {own})", ""]
        several = len(quantity.parts) > 1
        if several:
            lines += ["The largest of:", ""]
        for part in quantity.parts:
            lines += ["```", size_text(part.size, quantity.shown.point, style), "```", ""]
            where = place_text(part)
            when = f"; {when_text(part)}" if several else ""
            lines += [f"{where}{when}", ""] if where else []
            lines += [*_table(part, quantity.shown), ""]
    lines += ["| symbol | meaning | here |", "|---|---|---:|"]
    lines += [
        f"| {n} | {shown.meanings.get(n, '')} | {value_text(shown, n, value) if n == CUT else format(value, ',')} |"
        for n, value in shown.env.items()
    ]
    lines += [f"| {symbol} | {shown.meanings.get(symbol, '')} | {text} |" for symbol, text in shown.ties]
    lines += ["", "Valid for " + ", ".join(f"`{text}`" for text in conditions(common_domain(quantities))) + "."]
    return "\n".join(lines) + "\n"


def _table(part: Part, shown: Shown) -> list[str]:
    style = plain_style()
    lines = ["| term | made of |", "|---|---|"]
    for term in part.terms:
        made = "<br>".join(origins(term)[:8]) + (f"<br>{len(origins(term)) - 8} more" if len(origins(term)) > 8 else "")
        lines.append(f"| `{size_text(term.size, shown.point, style)}` | {made.replace('*', chr(92) + '*')} |")
    return lines
