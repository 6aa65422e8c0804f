"""`python -m benchmarks.throughput [--save]`: predicted speed beside published runs; `--save` writes the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.throughput.cases import CASES
from benchmarks.throughput.predict import predict
from benchmarks.throughput.table import csv_text, markdown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results.csv and results.md")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        print(f"  {case.name}", file=sys.stderr, flush=True)
        rows.append(predict(case))
    print(markdown(rows), end="")
    if options.save:
        here = Path(__file__).resolve().parent
        (here / "results.csv").write_text(csv_text(rows))
        (here / "results.md").write_text(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
