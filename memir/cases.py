"""One formula out of two programs: the exact one at the asked point, where a size (1, or a table's length) runs other operators
than its neighbours, and the general one everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memir.ir.domain import widened

if TYPE_CHECKING:
    from memir.analysis.peak import Peak
    from memir.report import Formulas


def same_formula(exact: Peak, general: Peak, pinned: Mapping[str, int]) -> bool:
    """Whether the general peak and resident bytes are those of the exact program where the pinned symbols have their values."""
    ours = {piece.size.substitute(pinned) for piece in general.total.pieces}
    theirs = {piece.size for piece in exact.total.pieces}
    return ours == theirs and general.resident.substitute(pinned) == exact.resident


def in_cases(exact: Formulas, general: Formulas, pinned: Mapping[str, int], same: bool) -> Formulas:
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
