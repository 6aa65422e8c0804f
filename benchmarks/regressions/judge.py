"""One pair judged: the bytes against real runs, the blamed line, the order of the formula's difference."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.regressions.cases import FOLDER, Case
from memir.api import program_of
from memir.diff.compare import Difference, compare
from memir.diff.inputs import side
from memir.diff.lines import compare_sources
from memir.diff.orders import leading, product_text
from memir.ir.symbolic import formula_text

TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Judged:
    """What `memir diff` says of a pair, and whether it is right."""

    case: Case
    found: Difference
    measured: int | None  # bytes

    @property
    def error(self) -> float | None:
        """Of the difference in bytes, relative to the measured one."""
        return None if self.measured is None else (self.found.nbytes - self.measured) / (abs(self.measured) or 1)

    @property
    def is_exact(self) -> bool:
        """Whether the difference is that of the real runs, within half a percent."""
        return self.error is not None and abs(self.error) <= TOLERANCE

    @property
    def is_right_line(self) -> bool:
        """Whether the first blamed line is the changed one."""
        if not self.found.blames:
            return False
        first = self.found.blames[0]
        return first.text in self.case.lines and bool(first.base_line) == self.case.removed

    @property
    def order(self) -> str:
        """How the difference grows with B and S."""
        orders = leading([self.found.delta])
        return " + ".join(product_text(order) for order in orders) or "1"

    @property
    def is_right_order(self) -> bool:
        """Whether it grows as it should."""
        return self.order == self.case.order

    @property
    def row(self) -> tuple[str, ...]:
        """A row of results.csv."""
        first = self.found.blames[0] if self.found.blames else None
        numbers = (self.found.before, self.found.after, self.found.nbytes, self.measured or 0)
        line = "" if first is None else f"{first.file.rpartition('/')[2]}:{first.line}"
        words = ("yes" if ok else "no" for ok in (self.is_exact, self.is_right_line, self.is_right_order))
        return (self.case.name, *map(str, numbers), line, first.text if first else "", formula_text(self.found.delta), *words)


HEADER = ("case", "before", "after", "delta", "measured_delta", "line", "code", "formula_delta", "bytes", "right_line", "order")
RESULTS = Path(__file__).with_name("results.csv")


def write_results(rows: Sequence[tuple[str, ...]]) -> None:
    """Keep the table."""
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(HEADER)
        out.writerows(sorted(rows))


def read_results() -> list[dict[str, str]]:
    """The kept table."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def judge(case: Case, runs: tuple[int, int] | None) -> Judged:
    """The pair traced and compared; `runs` are the real peaks before and after, in bytes."""
    names = [case.file(version) for version in ("before", "after")]
    traced = [program_of(name, case.recipe, batch=case.batch, seq=case.seq, cache=False) for name in names]
    texts = [(FOLDER / case.name / f"{version}.py").read_text(encoding="utf-8") for version in ("before", "after")]
    sources = compare_sources([(names[0], texts[0], names[1], texts[1])])
    found = compare(side(names[0], traced[0]), side(names[1], traced[1]), sources)
    return Judged(case, found, None if runs is None else runs[1] - runs[0])
