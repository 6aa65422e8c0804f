"""A traced step under distributed methods: the program of one rank, or of each rank of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memir.ir.core import Program
from memir.ir.size import Size
from memir.ir.unroll import bind, unroll
from memir.options import spec
from memir.parallel.every_stage import of_each_stage
from memir.pipeline import Pipeline
from memir.rewrite.lift import LiftError


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What a rank runs: `program` where it was asked, `general` at the neighbouring points, and what is to be told of them."""

    program: Program
    general: Program | None
    told: tuple[str, ...] = ()


def of_one_rank(program: Program, general: Program | None, depth: Mapping[str, int], passes: Pipeline) -> RankProgram:
    """The programs after the passes; where the layers do not repeat any more, with all of the `depth`, which is told."""
    told: tuple[str, ...] = ()

    def rewritten(one: Program) -> Program:
        nonlocal told
        try:
            return passes.run(one)
        except LiftError as error:
            told = (f"every layer is rewritten, as they do not repeat under {passes.spec()}: {error.message}",)
            return passes.run(unroll(bind(one, {name: value for name, value in depth.items() if name in one.dims})))

    same = [spec(p) for p in passes.passes if _degree(p) == 1]
    both = rewritten(program), None if general is None else rewritten(general)
    return RankProgram(*both, (*told, *(f"{text}: a degree of 1 changes nothing" for text in same)))


def _degree(one: object) -> int | None:
    degree = getattr(one, "degree", None)
    return degree.constant if isinstance(degree, Size) and degree.is_constant else degree if isinstance(degree, int) else None


def of_each_rank(
    program: Program, general: Program | None, depth: Mapping[str, int], passes: Pipeline
) -> tuple[RankProgram, ...]:
    """The programs of the ranks that differ: one for each stage of a pipeline, otherwise one."""
    return tuple(of_one_rank(program, general, depth, Pipeline(stage)) for stage in of_each_stage(passes.passes))
