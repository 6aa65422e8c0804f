"""Every published value as a row: what it is, measured, predicted; bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.replay import a100, t4
from benchmarks.replay.predict import Predicted, expanded_groups, predict, step

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
    base: int = (
        0  # what was already there before the step beyond memir's own sum (blocks left unsplit while weights were loaded)
    )
    note: str = ""

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
    for run in t4.RUNS:
        if only not in f"t4 {run.name} {run.case}":
            continue
        print(f"  {run.name}: {run.case}", file=sys.stderr, flush=True)
        preset, sets = t4.PRESETS[run.model]
        with expanded_groups():
            traced = step(preset, t4.recipe(run), run.batch, run.seq, sets)
        found = predict(traced, "7.5")
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
            yield Row("t4", run.name, run.case, value, round(measured * MIB), predicted, more)


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
