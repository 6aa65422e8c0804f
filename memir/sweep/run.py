"""A sweep: every recipe at every B and S, or its largest B or S, each traced as rarely as its programs' domains allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from memir.errors import InconclusiveError
from memir.hardware import Gpu
from memir.recipe import Recipe
from memir.sweep.grid import Numbers, Point
from memir.sweep.pool import DEFAULT_SEQ, MAX_TRACES, Holding, Pool, Step, Trace
from memir.sweep.solve import Largest, largest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variant:
    """One recipe of several, and what was assumed while it was traced."""

    recipe: Recipe
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One cell. `numbers` None: not known; `reason` says why it is not known or not proven, and is empty where it is proven."""

    variant: int  # position in the list of variants
    batch: int
    seq: int
    numbers: Numbers | None
    reason: str = ""
    fits: bool | None = None  # allocated bytes within the GPU's memory; None where no GPU is given or nothing is known


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a sweep, ordered by recipe, B, S; or the largest sizes, ordered by recipe and the other size."""

    name: str  # the model's
    versions: tuple[tuple[str, str], ...]
    variants: tuple[Variant, ...]
    gpu: Gpu | None
    rows: tuple[Row, ...] = ()
    largest: tuple[Largest, ...] = ()

    @property
    def lines(self) -> tuple[Row | Largest, ...]:
        """What is printed, one line each."""
        return (*self.rows, *self.largest)

    @property
    def is_proven(self) -> bool:
        """Whether every row is."""
        return not any(row.reason for row in self.lines)

    @property
    def fits_nowhere(self) -> bool:
        """Whether a GPU was given and no row fits it."""
        if self.largest:
            return all(row.value is None for row in self.largest)
        return self.gpu is not None and not any(row.fits for row in self.rows)


def sweep(
    traces: Mapping[Recipe, Trace],
    batches: Sequence[int],
    seqs: Sequence[int] | None,
    gpu: Gpu | None = None,
    max_traces: int = MAX_TRACES,
) -> Table:
    """The grid B x S of each recipe. `seqs` None: the default length, 2048 or the model's limit.

    Points that no program is proven for are rows with a reason. UsageError: a target or option is wrong; InconclusiveError: the
    only recipe cannot be traced at all.
    """

    def rows(number: int, pool: Pool) -> list[Row]:
        try:
            lengths = seqs or (pool.default_seq(min(batches)),)
            return _rows(number, [(batch, seq) for batch in batches for seq in lengths], pool, gpu)
        except InconclusiveError as error:
            if len(traces) == 1:
                raise
            lengths = seqs or (DEFAULT_SEQ,)
            return [Row(number, batch, seq, None, error.message) for batch in batches for seq in lengths]

    found, table = _each(traces, gpu, max_traces, rows)
    return replace(table, rows=tuple(found))


def solve(
    traces: Mapping[Recipe, Trace], symbol: str, others: Sequence[int] | None, gpu: Gpu, max_traces: int = MAX_TRACES
) -> Table:
    """The largest `symbol` ("B" or "S") that fits the GPU, for each recipe at each value of the other symbol.

    `others` None: B=1, or the default length. Errors as `sweep`.
    """

    def rows(number: int, pool: Pool) -> list[Largest]:
        try:
            values = others or ((1,) if symbol == "S" else (pool.default_seq(1),))
            return [largest(pool, number, symbol, value, gpu) for value in values]
        except InconclusiveError as error:
            if len(traces) == 1:
                raise
            values = others or ((1,) if symbol == "S" else (DEFAULT_SEQ,))
            return [Largest(number, symbol, value, reason=error.message) for value in values]

    found, table = _each(traces, gpu, max_traces, rows)
    return replace(table, largest=tuple(found))


def _each(
    traces: Mapping[Recipe, Trace], gpu: Gpu | None, max_traces: int, rows: Callable[[int, Pool], list[T]]
) -> tuple[list[T], Table]:
    """The rows of all recipes, and the table that they belong to."""
    variants: list[Variant] = []
    steps: list[Step] = []
    found: list[T] = []
    for number, (recipe, trace) in enumerate(traces.items()):
        pool = Pool(trace, rounds=recipe.target == "cuda", max_traces=max_traces)
        found += rows(number, pool)
        variants.append(Variant(recipe, pool.assumptions))
        steps += pool.steps[:1]
    name, versions = (steps[0].name, steps[0].versions) if steps else ("", ())
    return found, Table(name, versions, tuple(variants), gpu)


def _rows(number: int, points: Sequence[Point], pool: Pool, gpu: Gpu | None) -> list[Row]:
    found, reasons = pool.assign(points)
    together: dict[Holding, list[Point]] = {}
    for point, holding in found.items():
        together.setdefault(holding, []).append(point)
    numbers: dict[Point, Numbers] = {}
    for holding, own in together.items():
        numbers.update(zip(own, holding.grid.numbers(own), strict=True))
    rows = []
    for point in points:
        known = numbers.get(point)
        reason = reasons.get(point, "") if known is None else "; ".join(found[point].doubts)
        fits = None if gpu is None or known is None else known.allocated <= gpu.nbytes
        rows.append(Row(number, *point, known, reason, fits))
    return rows
