"""The symbolic answer as text: a line for each formula in bytes, and where each part of the peak is the peak.

    peak = Max(15385002144, 2375204*B*S + 512*S + 8)

The text parses with sympy: `sympy.sympify(text, locals={"B": B, "S": S})`, where B and S are integer symbols. Without `locals`
sympy reads a bare S as its own registry. With `latex` the same as lines of LaTeX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TextIO

from memir.analysis.domain import domain_text
from memir.analysis.peak import Peak, Piece, peak
from memir.analysis.regions import maximum, regions
from memir.ir.core import Program
from memir.ir.size import Size
from memir.ir.symbolic import formula_text


@dataclass(frozen=True, slots=True)
class Formula:
    """`latex` writes LaTeX, for which sympy is imported."""

    name: ClassVar[str] = "formula"
    latex: bool = False

    def emit(self, program: Program, out: TextIO) -> None:
        """Write the formulas of the peak, of each phase's peak, and of what stays alive between steps. Errors as `peak`."""
        found = peak(program)
        lines = _latex(found) if self.latex else _text(found, program)
        out.write("\n".join(lines) + "\n")


def _text(found: Peak, program: Program) -> list[str]:
    lines = [f"peak = {maximum(found.total)}", f"steady = {formula_text(found.resident, program.dims)}"]
    lines += [f"{name} = {maximum(envelope)}" for name, envelope in found.phases]
    for region in regions(found.total):
        when = region.when if region.when != "True" else "everywhere"
        lines.append(f"# {formula_text(region.piece.size, program.dims)}: {_place(region.piece)}, where {when}")
    domain = domain_text(program.dims, program.domain)
    return [*lines, f"# bytes, valid for {', '.join(domain)}"] if domain else [*lines, "# bytes"]


def _place(piece: Piece) -> str:
    place = piece.place
    if not place.opcode:
        return "at the start of the step"
    where = ", ".join(filter(None, (place.source, place.path)))
    return f"in {place.phase} at {place.opcode}" + (f" ({where})" if where else "")


def _latex(found: Peak) -> list[str]:
    lines = [_equation("peak", [piece.size for piece in found.total.pieces]), _equation("steady", [found.resident])]
    return lines + [_equation(name, [piece.size for piece in envelope.pieces]) for name, envelope in found.phases]


def _equation(name: str, sizes: Sequence[Size]) -> str:
    """`\\mathrm{peak} = \\max\\left(a, b\\right)`; each part by sympy, so that powers and ceilings come out right."""
    import sympy

    from memir.ir.symbolic import to_sympy

    parts = [sympy.latex(to_sympy(size)) for size in sizes]
    right = parts[0] if len(parts) == 1 else rf"\max\left({', '.join(parts)}\right)"
    return rf"\mathrm{{{name}}} = {right}"
