"""`python -m benchmarks.freeze_pass [--only WORD]`."""

from __future__ import annotations

import argparse
import csv
import sys
from itertools import groupby
from pathlib import Path

from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.freeze_pass.cases import Case, all_cases
from benchmarks.freeze_pass.run import PHASES, Figures, measured, predicted

RESULTS = Path(__file__).with_name("results.csv")
TOLERANCE = 1024  # bytes
POINTS = ("start", *PHASES, "end")
COLUMNS = ("case", *(f"{point}_{what}" for point in POINTS for what in ("measured", "difference")), "verdict")


def row(real: Figures, told: Figures) -> dict[str, str]:
    """One line of results.csv: bytes measured, and predicted minus measured, at each of POINTS."""
    error = real.error or told.error
    if error:
        return dict.fromkeys(COLUMNS, "") | {"case": real.case, "verdict": " ".join(error.split())}
    differences = [p - m for p, m in zip(told.numbers, real.numbers, strict=True)]
    worst = max(map(abs, differences))
    cells = {f"{point}_measured": str(m) for point, m in zip(POINTS, real.numbers, strict=True)}
    cells |= {f"{point}_difference": str(d) for point, d in zip(POINTS, differences, strict=True)}
    verdict = "exact" if not worst else "within 1 KiB" if worst <= TOLERANCE else "beyond 1 KiB"
    return {"case": real.case, **cells, "verdict": verdict}


def show(cells: dict[str, str]) -> str:
    """The line as it is printed."""
    if not cells["start_measured"]:
        return f"{cells['case']:44} {cells['verdict']}"
    points = (f"{int(cells[f'{p}_measured']):>12,} {int(cells[f'{p}_difference']):+5d}" for p in POINTS)
    return f"{cells['case']:44} {' '.join(points)}  {cells['verdict']}"


def read() -> dict[str, dict[str, str]]:
    """The committed lines by case."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return {line["case"]: line for line in csv.DictReader(file)}


def write(rows: dict[str, dict[str, str]], known: list[str]) -> None:
    """results.csv, in the order of the cases."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in known if name in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.freeze_pass", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="only cases with WORD in their name; other lines stay")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    options = parser.parse_args()
    every = all_cases()
    cases = [case for case in every if options.only in case.name]
    if not cases:
        print(f"no case has {options.only!r} in its name", file=sys.stderr)
        return 2
    batches: list[list[Case]] = [list(group) for _, group in groupby(cases, lambda case: (case.model, case.recipe_name))]
    told = [figures for batch in each_in_fresh_process(predicted, batches, options.jobs) for figures in batch]
    done = []
    print(f"{'bytes measured, predicted minus measured':44} {' '.join(f'{point:>18}' for point in POINTS)}")
    for real, figures in zip(each_in_fresh_process(measured, cases, options.jobs), told, strict=True):
        done.append(row(real, figures))
        print(show(done[-1]), flush=True)
        write({**read(), real.case: done[-1]}, [case.name for case in every])
    verdicts = [line["verdict"] for line in done]
    good = sum(verdict in ("exact", "within 1 KiB") for verdict in verdicts)
    print(f"{len(done)} cases: {verdicts.count('exact')} exact, {good} within 1 KiB, {len(done) - good} others")
    return 0 if good == len(done) else 1


if __name__ == "__main__":
    sys.exit(main())
