"""A case derived from the code, and compared term by term."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.published_formulas.cases import Case
from memir.api import wide_step
from memir.derivation.derive import Derivation
from memir.derivation.step import shown
from memir.derivation.terms import Term
from memir.ir.size import Size
from memir.ir.sizetext import parse_size
from memir.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Result:
    """`derived` is over the published symbols."""

    case: Case
    derived: Size
    difference: Size  # derived - published
    terms: tuple[Term, ...]  # of the derived formula before symbols were replaced
    verified_at: str

    @property
    def is_accounted_for(self) -> bool:
        """Whether the difference is the one that is explained."""
        return self.difference is self.case.expected()


def derive(case: Case) -> Result:
    """Traces the case's target."""
    step = wide_step(case.target, case.recipe, sets=dict(case.sets))
    if case.parallel:
        program = Pipeline.parse(case.parallel).run(step.program)
        step = replace(step, program=program, env={**step.env, **dict.fromkeys(set(program.dims) - set(step.program.dims), 2)})
    over = shown(step, tuple(case.symbols.split(",")))
    quantity = Derivation(over, elements=case.elements).quantity(case.of)
    (part,) = quantity.parts
    size, terms = part.size, part.terms
    if case.by_depth:
        size = Size((m, c) for m, c in size.terms if ("L", 1) in m and "B" in dict(m))
        terms = tuple(term for term in terms if ("L", 1) in term.monomial and "B" in dict(term.monomial))
    for symbol, text in case.replaced:
        size = size.substitute({symbol: parse_size(text)})
    verified = ", ".join(f"{name}={value}" for name, value in step.verified_at[0].items())
    return Result(case, size, size - parse_size(case.published), terms, verified)
