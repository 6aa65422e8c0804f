"""The pairs of models in tests/regressions, and what was measured of them."""

from __future__ import annotations

import csv
import tomllib
from dataclasses import dataclass
from pathlib import Path

from memir.recipe import Recipe

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "regressions"
MEASURED = FOLDER / "measured.csv"


@dataclass(frozen=True, slots=True)
class Case:
    """A model before and after a change."""

    name: str
    lines: tuple[str, ...]  # the code behind the difference: any of these lines
    removed: bool  # they are in before.py only
    order: str  # how the difference grows: "B*S", "1"
    batch: int
    seq: int
    dtype: str

    @property
    def recipe(self) -> Recipe:
        """On the CPU, where real runs can be had."""
        return Recipe(target="cpu", dtype=self.dtype)

    def file(self, version: str) -> str:
        """`before` or `after` as a path from the repository's root."""
        return (FOLDER / self.name / f"{version}.py").relative_to(FOLDER.parents[1]).as_posix()


def cases() -> list[Case]:
    """All pairs, by name."""
    table = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))
    return [
        Case(name, tuple(c["lines"]), c.get("removed", False), c["order"], c["batch"], c["seq"], c["dtype"])
        for name, c in sorted(table.items())
    ]


def measured() -> dict[str, tuple[int, int]]:
    """Peaks in bytes of real runs before and after, by case."""
    if not MEASURED.exists():
        return {}
    with MEASURED.open(encoding="utf-8", newline="") as file:
        return {row["case"]: (int(row["before"]), int(row["after"])) for row in csv.DictReader(file)}


def write_measured(found: dict[str, tuple[int, int]]) -> None:
    """Keep what was measured."""
    with MEASURED.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("case", "before", "after"))
        out.writerows((name, *found[name]) for name in sorted(found))
