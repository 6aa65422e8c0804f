"""Every published value as a row: what it is, measured, predicted; bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from benchmarks.replay import a100, t4
from benchmarks.replay.predict import Predicted, expanded_groups, predict, predict_loaded, step
from memir.api import TracedProgram
from memir.recipe import Recipe

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One value. `source` is a word for the group of rows, `base` the measured resident bytes less the predicted ones."""

    source: str
    run: str
    case: str
    value: str  # peak, steady, resident, forward, backward, optimizer, reserved
    measured: int
    predicted: int
    base: int = 0
    least: int = 0  # of `resident`, where the load was played: the least and the most of its courses
    most: int = 0

    @property
    def error(self) -> float:
        """Percent."""
        return 100 * (self.predicted - self.measured) / self.measured

    @property
    def error_of_step(self) -> float:
        """Percent, with the measured bytes before the step in the place of the predicted ones."""
        return 100 * (self.predicted + self.base - self.measured) / self.measured

    def as_dict(self) -> dict[str, object]:
        """For the file of results."""
        return asdict(self) | {"error_percent": round(self.error, 4), "error_of_step_percent": round(self.error_of_step, 4)}


def t4_rows(only: str) -> Iterator[Row]:
    """The rows of the T4, a run at a time."""
    steps: dict[tuple[str, Recipe, bool], TracedProgram] = {}  # B=1 has a program of its own
    for run in t4.RUNS:
        if only not in f"t4 {run.name} {run.case}":
            continue
        print(f"  {run.name}: {run.case}", file=sys.stderr, flush=True)
        preset, sets = t4.PRESETS[run.model]
        key = (run.model, t4.recipe(run), run.batch == 1)
        traced = steps.get(key)
        if traced is None or traced.general is not None:  # else it holds at all batches and lengths
            with expanded_groups():
                traced = steps[key] = step(preset, t4.recipe(run), run.batch, run.seq, sets)
        traced = replace(traced, point={"B": run.batch, "S": run.seq})
        found = predict_loaded(traced, "7.5", t4.MEASURED_STEP)
        yield from _of_run(run, found)


def _of_run(run: t4.Run, found: Predicted) -> Iterator[Row]:
    base = 0 if run.resident is None else round(run.resident * MIB) - found.resident
    values = (
        ("peak", run.peak, found.peak, base),
        ("resident", run.resident, found.resident, base),
        ("forward", run.forward, found.phases["forward"], base),
        ("backward", run.backward, found.phases["backward"], base),
        ("optimizer", run.optimizer, found.phases["optimizer"], base),
        ("reserved", run.reserved, found.reserved, 0),
    )
    for value, measured, predicted, more in values:
        if measured is not None:
            courses = (found.least, found.most) if value == "resident" else (0, 0)
            yield Row("t4", run.name, run.case, value, round(measured * MIB), predicted, more, *courses)


def a100_rows(only: str) -> Iterator[Row]:
    """The rows of the A100; run them under transformers 4.48.1 (see __main__)."""
    for fact in a100.FACTS:
        if only not in f"a100 {fact.case}":
            continue
        print(f"  a100: {fact.case}", file=sys.stderr, flush=True)
        traced = step(fact.preset, a100.RECIPES[fact.method], fact.batch, fact.seq, fact.sets)
        found = predict(traced, "8.0")
        yield Row("a100", "a100_80gb.csv", fact.case, "peak", fact.peak, found.peak)
        yield Row("a100", "a100_80gb.csv", fact.case, "steady", fact.steady, found.steady)
