"""`python -m benchmarks.llmem_table3 [--save]`: LLMem's choices on four GPUs beside memir's; `--save` writes the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.llmem_table3.facts import FACTS
from benchmarks.llmem_table3.predict import cells
from benchmarks.llmem_table3.table import csv_text, markdown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llmem_table3", description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results.csv and results.md")
    options = parser.parse_args()
    rows = []
    for fact in FACTS:
        print(f"  {fact.name}", file=sys.stderr, flush=True)
        rows += cells(fact)
    print(markdown(rows), end="")
    if options.save:
        here = Path(__file__).resolve().parent
        (here / "results.csv").write_text(csv_text(rows))
        (here / "results.md").write_text(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
