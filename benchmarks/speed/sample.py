"""Whether rows of the sweep are what single analyses say."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping
from pathlib import Path

from benchmarks.speed.cases import MODELS, PYTHON
from benchmarks.speed.measure import run

SAMPLE = 10


def compare(table: Path, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """How many rows were compared, always the same ones, and those that differ from `memir analyze` of that point."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = [rows[0], rows[-1], *random.Random(0).sample(rows[1:-1], SAMPLE - 2)]
    different = []
    for row in chosen:
        at = ("-b", row["B"], "-s", row["S"])
        found = json.loads(run((PYTHON, "-m", "memir", "analyze", MODELS[0], *at, "--format", "json"), environment).stdout)
        single = {
            "requested_bytes": str(found["peak"]["requested_bytes"]),
            "allocated_bytes": str(found["peak"]["allocated_bytes"]),
            "steady_requested_bytes": str(found["steady"]["requested_bytes"]),
            "steady_allocated_bytes": str(found["steady"]["allocated_bytes"]),
            **{name: found["peak"][name] for name in ("phase", "op", "module", "source")},
        }
        if any(row[name] != value for name, value in single.items()):
            different.append(f"B={row['B']} S={row['S']}")
    return len(chosen), different
