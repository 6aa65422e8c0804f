"""`python -m benchmarks.replay [t4|a100] [--only WORD] [--save]`: published values beside memir's predictions.

The A100's rows are run under transformers 4.48.1, in the environment that `python -m benchmarks.mistral environment` makes.
`--save` writes results.csv and results.md. Exit code 1: the median of the allocated values is off by more than 0.05 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.mistral.environment import ROOT, default_folder, make
from benchmarks.replay.rows import Row, a100_rows, t4_rows
from benchmarks.replay.table import csv_text, from_csv, markdown

MEDIAN = 0.05  # percent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("source", nargs="?", choices=("t4", "a100", "all"), default="all")
    parser.add_argument("--only", default="", metavar="WORD", help="runs with WORD in their name")
    parser.add_argument("--save", action="store_true", help="write results.csv and results.md")
    parser.add_argument("--data", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data:
        print(csv_text(list(a100_rows(options.only))), end="")
        return 0
    rows: list[Row] = []
    if options.source != "t4":
        rows += _under_4_48(options.only)
    if options.source != "a100":
        rows += t4_rows(options.only)
    here = Path(__file__).resolve().parent
    if options.save and options.source != "all":  # the other source's rows stay as they were
        before = from_csv((here / "results.csv").read_text()) if (here / "results.csv").exists() else []
        rows = sorted([*rows, *(row for row in before if row.source != options.source)], key=lambda row: row.source)
    print(markdown(rows), end="")
    if options.save:
        (here / "results.csv").write_text(csv_text(rows))
        (here / "results.md").write_text(markdown(rows))
    allocated = [abs(row.error) for row in rows if row.value in ("peak", "steady")]
    return 1 if allocated and statistics.median(allocated) > MEDIAN else 0


def _under_4_48(only: str) -> list[Row]:
    """The A100's rows, traced in the other environment."""
    command = [str(make(default_folder())), "-m", "benchmarks.replay", "a100", "--data", "--only", only]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return from_csv(subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
