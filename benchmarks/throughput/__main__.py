"""`python -m benchmarks.throughput [--save]`: predicted speed beside published runs; `--save` writes the results."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.pages import main
from benchmarks.throughput.cases import CASES
from benchmarks.throughput.predict import predict
from benchmarks.throughput.table import csv_text, markdown

if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    sys.exit(main("benchmarks.throughput", __doc__, CASES, lambda case: [predict(case)], csv_text, markdown, folder))
