"""`python -m benchmarks.published_formulas [--only WORD]`: derives the published formulas, prints and writes the page.

Exit code 1: a difference is not the one that is accounted for. With --only nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    from benchmarks.published_formulas.cases import CASES
    from benchmarks.published_formulas.derive import derive
    from benchmarks.published_formulas.table import csv_text, markdown

    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_formulas", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="formulas with WORD in their name; writes nothing")
    only = parser.parse_args().only
    results = [derive(case) for case in CASES if only in case.name]
    print(markdown(results), end="")
    if not only:
        here = Path(__file__).resolve().parent
        (here / "results.md").write_text(markdown(results))
        (here / "results.csv").write_text(csv_text(results))
    wrong = [result for result in results if not result.is_accounted_for]
    for result in wrong:
        print(f"{result.case.name}: the difference {result.difference} is not accounted for", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
