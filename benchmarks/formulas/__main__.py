"""`python -m benchmarks.formulas [PRESET ...] [--real]`: formulas over widths beside fresh traces, at random points.

Without a preset all of cases.py; rows of others in results.csv stay. --real runs steps on the CPU too. Exit code 1: not equal.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.formulas.cases import PRESETS, REAL, points_of
from benchmarks.formulas.run import TARGETS, Row, Verified, real_rows
from benchmarks.formulas.table import HERE, csv_text, markdown, read


def write(presets: list[str], how: str, rows: list[Row]) -> None:
    """Puts rows in the place of those of the same presets."""
    results = HERE / "results.csv"
    others = [row for row in read() if row.preset not in presets or row.how != how] if results.is_file() else []
    results.write_text(csv_text([*others, *rows]))
    (HERE / "results.md").write_text(markdown([*others, *rows]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formulas", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--real", action="store_true", help="steps on the CPU, not traces")
    parser.add_argument("--few", action="store_true", help="one trace and one set of widths; writes nothing")
    options = parser.parse_args()
    chosen = options.presets or (REAL if options.real else PRESETS)
    how = "real step" if options.real else "analysis"
    rows: list[Row] = []
    for preset in chosen:
        if options.real:
            found = list(real_rows(preset))
        else:
            verified = Verified(preset, TARGETS["cuda"])
            points = points_of(preset)
            found = [row for together in (points[1:3] if options.few else points) for row in verified.rows(together)]
        for row in found:
            figures = f"{row.formula:>18,} {row.fresh:>18,} {row.formula - row.fresh:>+10,}"
            print(f"{row.preset:16} {row.quantity:8} {figures}  {row.where}", flush=True)
        rows += found
        if not options.few:  # after each, for it takes a while
            write([preset], how, found)
    return 0 if all(row.is_equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
