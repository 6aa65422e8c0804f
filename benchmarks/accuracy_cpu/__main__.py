"""`python -m benchmarks.accuracy_cpu [--only WORD] [--jobs N] [--measure]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

from benchmarks.accuracy_cpu.cases import Case, all_cases
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.accuracy_cpu.run import Figures, measured, predicted
from benchmarks.accuracy_cpu.table import (
    MEASURED,
    RESULTS,
    VERDICTS,
    MeasuredRow,
    Row,
    compare,
    read_measured,
    summary,
    versions,
    write,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy_cpu", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="only cases with WORD in their name; results.csv stays")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--measure", action="store_true", help="run the cases for real first, and write measured.csv")
    parser.add_argument("--missing", action="store_true", help="with --measure: only cases that measured.csv lacks")
    options = parser.parse_args()
    every = all_cases()
    cases = [case for case in every if options.only in case.name]
    if not cases:
        print(f"no case has {options.only!r} in its name", file=sys.stderr)
        return 2
    if options.measure:
        if options.missing:
            have = read_measured()
            cases = [case for case in cases if case.name not in have]
        return measure(cases, {case.name for case in every}, options.jobs)
    truth = read_measured()
    lacking = [case.name for case in cases if case.name not in truth]
    if lacking:
        print(f"not measured yet: {', '.join(lacking)}  (--measure)", file=sys.stderr)
        return 2
    rows: dict[str, Row] = {}
    for case, figures in _each(predicted, cases, options.jobs):
        row = rows[case.name] = compare(case, truth[case.name], figures)
        if row.verdict not in VERDICTS[:2] or options.only:
            differences = (row.start_difference, row.peak_difference, row.end_difference)
            print(f"{row.case:36}", *(f"{d:+13,}" for d in differences), f" {row.verdict}  {row.reason}", flush=True)
    print(summary(rows))
    if not options.only:
        write(RESULTS, rows.values())
    named = all(row.verdict in VERDICTS[:2] or (row.verdict == VERDICTS[2] and row.reason) for row in rows.values())
    return 0 if named else 1


def measure(cases: list[Case], known: set[str], jobs: int) -> int:
    """Runs the cases and writes measured.csv; rows of other cases stay, those of cases that are no more go."""
    rows = {name: row for name, row in read_measured().items() if name in known}
    failed = 0
    for case, figures in _each(measured, cases, jobs):
        if figures.error:
            failed += 1
            print(f"{case.name}: {figures.error}", flush=True)
            continue
        rows[case.name] = MeasuredRow(
            case.name, case.batch, case.seq, figures.at_start, figures.peak, figures.at_end, figures.peak_op, **versions()
        )
        write(MEASURED, rows.values())
    print(f"{len(cases) - failed} measured, {failed} failed")
    return 1 if failed else 0


def _each(work: Callable[[Case], Figures], cases: list[Case], jobs: int) -> Iterator[tuple[Case, Figures]]:
    for number, (case, figures) in enumerate(zip(cases, each_in_fresh_process(work, cases, jobs), strict=True), start=1):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{number}/{len(cases)} {case.name}", end="\r", file=sys.stderr, flush=True)
        yield case, figures


if __name__ == "__main__":
    sys.exit(main())
