"""The programs of one traced step under lists of passes: what lists begin with alike is rewritten once, and so are degrees.

A degree that a pass takes as a symbol is one: of `tensor-parallel{degree=2}`, `{degree=4}` and `{degree=8}` there is one
program over t. What PyTorch's DistributedDataParallel allocates does not depend on how many ranks there are, so two stand for
all. Every row of a plan that is printed is recomputed without any of this (`memir.planner.variant.exact`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Program
from memir.ir.domain import broken
from memir.ir.size import Size
from memir.ir.unroll import bind, unroll
from memir.one_rank import repeats_no_more
from memir.parallel.every_stage import of_each_stage
from memir.pipeline import Pass, PassError, Pipeline

_SYMBOLS = {"tensor-parallel": "t", "fsdp": "d"}  # passes whose degree may be a symbol
_ANY = {"data-parallel": 2}  # passes of which one degree has the bytes of all


@dataclass(frozen=True, slots=True)
class Made:
    """The programs of the ranks that differ, one for each stage of a pipeline, and the degrees that are symbols in them."""

    programs: tuple[Program, ...]
    degrees: tuple[tuple[str, int], ...] = ()


class Programs:
    """The programs of one step; `depth` has the numbers that the target fixes, such as {"L": 32}."""

    def __init__(self, program: Program, depth: Mapping[str, int]) -> None:
        self.program, self.depth = program, depth
        self._after: dict[tuple[Pass, ...], Program | MemirError] = {}
        self._flat: Programs | None = None
        self._hopeless: dict[tuple[Pass, ...], InconclusiveError] = {}  # passes over degrees -> why they end with numbers, too

    def made(self, text: str, *, symbols: bool = True) -> Made:
        """The step after the passes of `text`, all degrees as numbers without `symbols`. Errors are those of the passes."""
        stages = of_each_stage(Pipeline.parse(text).passes)
        general, degrees = _general(stages[0], self.program.dims) if symbols and len(stages) == 1 else (stages[0], {})
        if general in self._hopeless:
            raise self._hopeless[general]
        if general != stages[0]:
            try:
                program = self.after(general)
                if broken(program.domain, {**self.depth, **degrees}) is None:
                    return Made((program,), tuple(degrees.items()))
            except (UsageError, InconclusiveError, PassError):
                pass  # not with a symbol: each degree has a program of its own, or a reason
        try:
            return Made(tuple(self._numbered(stage) for stage in stages))
        except InconclusiveError as error:  # what memir cannot follow with a symbol nor at one degree, at no other either
            if degrees:
                self._hopeless[general] = error
            raise

    def _numbered(self, passes: Sequence[Pass]) -> Program:
        """The program after the passes; with all layers one by one where they do not repeat afterwards (`run_on`)."""
        try:
            return self.after(passes)
        except InconclusiveError as error:
            if not repeats_no_more(error):
                raise
            known = {name: value for name, value in self.depth.items() if name in self.program.dims}
            if not known:
                raise
            self._flat = self._flat or Programs(unroll(bind(self.program, known)), {})
            return self._flat.after(passes)

    def after(self, passes: Sequence[Pass]) -> Program:
        """The program after the passes, each beginning of the list once. Errors are those of the passes."""
        if not passes:
            return self.program
        key = tuple(passes)
        if key not in self._after:
            try:
                self._after[key] = Pipeline(tuple(passes[-1:])).run(self.after(passes[:-1]), verify=False)
            except MemirError as error:
                self._after[key] = error
        found = self._after[key]
        if isinstance(found, MemirError):
            raise found
        return found


def _general(passes: Sequence[Pass], taken: Sequence[str]) -> tuple[tuple[Pass, ...], dict[str, int]]:
    """The passes with symbols for their degrees, and the degrees; as they are where one of them wants numbers around it."""
    found: list[Any] = []
    degrees: dict[str, int] = {}
    for one in passes:
        number = Size.of(getattr(one, "degree", 1))
        symbol = _SYMBOLS.get(one.name)
        if one.name == "activation-checkpoint":
            found.append(one)
        elif symbol is not None and symbol not in taken and symbol not in degrees and number.constant > 1:
            degrees[symbol] = number.constant
            found.append(replace(one, degree=Size.of(symbol)))  # type: ignore[type-var]
        elif one.name in _ANY and number.constant > 1:
            found.append(replace(one, degree=_ANY[one.name]))  # type: ignore[type-var]
        else:
            return tuple(passes), {}
    return tuple(found), degrees
