"""`python -m benchmarks.mistral [--env FOLDER] [--only WORD] [--here]`: predicts the published runs of Mistral-7B.

Makes the environment of the runs in FOLDER (default: in the user's cache), runs itself in it, prints the tables, and writes
results.md and results.csv. Exit code 1: a peak is off by more than 0.25 %, or full fine-tuning is not 10.00 bytes a parameter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.mistral.environment import ROOT, default_folder, make

TOLERANCE = 0.0025  # of the measured peak, for the trace alone


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mistral", description=__doc__)
    parser.add_argument("--env", type=Path, default=default_folder(), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="WORD", help="loops with WORD in their method or name; writes nothing")
    parser.add_argument("--here", action="store_true", help="in this environment, whatever its versions; writes nothing")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="?", choices=("run", "environment"), default="run", help="environment: only make it")
    options = parser.parse_args()
    if options.here:
        return predictions(options.only, options.write)
    python = make(options.env)
    if options.command == "environment":
        print(python)
        return 0
    rest = ["--only", options.only] if options.only else ["--write"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "benchmarks.mistral", "--here", *rest]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def predictions(only: str, write: bool) -> int:
    """Traces every loop here, prints the page, and judges it."""
    from benchmarks.mistral.rows import LOOPS, judge, predict
    from benchmarks.mistral.table import csv_text, markdown

    rows = [row for loop in LOOPS if only in f"{loop.method} {loop.name}" for row in predict(loop)]
    print(markdown(rows), end="")
    if write:
        here = Path(__file__).resolve().parent
        (here / "results.md").write_text(markdown(rows))
        (here / "results.csv").write_text(csv_text(rows))
    problems = [problem for row in rows for problem in judge(row, TOLERANCE)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
