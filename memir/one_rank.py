"""A traced step under distributed methods: the program of one rank, or of each rank of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.domain import broken
from memir.ir.size import Size
from memir.ir.unroll import bind, unroll
from memir.options import spec
from memir.parallel.every_stage import names_stage, num_stages, of_each_stage
from memir.parallel.order import check_together
from memir.parallel.recipes import expanded
from memir.pipeline import Pipeline
from memir.rewrite.lift import LiftError


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What a rank runs: `program` where it was asked, `general` at the neighbouring points, and what is to be told of them."""

    program: Program
    general: Program | None
    told: tuple[str, ...] = ()


def run_on(
    passes: Pipeline,
    program: Program,
    depth: Mapping[str, int],
    *,
    verify: bool = True,
    beyond: type[InconclusiveError] = LiftError,
) -> tuple[Program, InconclusiveError | None]:
    """The program after the passes; where the error `beyond` ends them over a number of layers that is a symbol, or what they
    make is for more layers than there are, with all layers of the `depth` one by one, and that error."""
    known = {name: value for name, value in depth.items() if name in program.dims}
    try:
        new = passes.run(program, verify=verify)
        text = broken(new.domain, known)
        if text is not None:
            raise LiftError(f"the rewritten layers repeat where {text}")
        return new, None
    except (beyond, LiftError) as error:
        if not known:
            raise
        return passes.run(unroll(bind(program, known)), verify=verify), error


def methods(text: str, accumulate: int = 1) -> Pipeline:
    """The passes of `--parallel`, for a step of so many micro-batches. UsageError for an order or a pair that cannot be."""
    passes = Pipeline.parse(expanded(text))
    check_together(passes.passes, accumulate)
    return passes


def repeats_no_more(error: InconclusiveError) -> bool:
    """Whether it says no more than that the layers do not repeat after a rewrite: then it can be done on all of them."""
    return isinstance(error, LiftError) or isinstance(error.__cause__, LiftError)


def of_one_rank(program: Program, general: Program | None, depth: Mapping[str, int], passes: Pipeline) -> RankProgram:
    """The programs after the passes; where the layers do not repeat any more, with all of the `depth`, which is told."""
    told: tuple[str, ...] = ()

    def rewritten(one: Program) -> Program:
        nonlocal told
        new, error = run_on(passes, one, depth)
        if error is not None:
            told = (f"every layer is rewritten, as they do not repeat under {passes.spec()}: {error.message}",)
        return new

    same = [spec(p) for p in passes.passes if _degree(p) == 1]
    both = rewritten(program), None if general is None else rewritten(general)
    assumed = [text for p in passes.passes for text in getattr(p, "assumes", tuple)()]
    return RankProgram(*both, (*told, *assumed, *(f"{text}: a degree of 1 changes nothing" for text in same)))


def _degree(one: object) -> int | None:
    degree = getattr(one, "degree", None)
    return degree.constant if isinstance(degree, Size) and degree.is_constant else degree if isinstance(degree, int) else None


def check_stage(text: str, passes: Pipeline) -> None:
    """UsageError where the `text` of the passes has a pipeline and does not say which stage."""
    if num_stages(passes.passes) > 1 and not names_stage(text):
        message = f"{passes.spec()}: which stage? They take different amounts of memory"
        raise UsageError(message, hint="pipeline-parallel{... stage=0};  memir analyze  shows all of them")


def of_each_rank(
    text: str, program: Program, general: Program | None, depth: Mapping[str, int], passes: Pipeline
) -> tuple[RankProgram, ...]:
    """The programs of the ranks that differ: one for each stage of a pipeline, unless the passes' `text` says which."""
    stages = (passes.passes,) if names_stage(text) else of_each_stage(passes.passes)
    return tuple(of_one_rank(program, general, depth, Pipeline(stage)) for stage in stages)
