"""`python -m benchmarks.regressions [CASE...]`: the table. `--measure` runs the steps for real first and keeps their peaks."""

from __future__ import annotations

import sys

import click

from benchmarks.regressions.cases import cases, measured, write_measured
from benchmarks.regressions.judge import judge, write_results
from memir.runtime.real import RealStep, measure_in_child


@click.command()
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Keep what was found in results.csv.")
@click.option("--measure", is_flag=True, help="Run the steps on this machine's CPU and write measured.csv.")
def main(names: tuple[str, ...], write: bool, measure: bool) -> None:
    """Compare each pair, beside what was measured."""
    chosen = [case for case in cases() if not names or case.name in names]
    if measure:
        found = measured() if names else {}
        for case in chosen:
            runs = [RealStep(case.file(v), case.recipe, case.batch, case.seq) for v in ("before", "after")]
            peaks = [measure_in_child(run).peak for run in runs]
            found[case.name] = peaks[0], peaks[1]
            write_measured(found)
    known = measured()
    right = [0, 0, 0]
    rows = []
    for case in chosen:
        result = judge(case, known.get(case.name))
        marks = [result.is_exact, result.is_right_line, result.is_right_order]
        right = [a + b for a, b in zip(right, marks, strict=True)]
        rows.append(result.row)
        words = ["ok" if mark else "NO" for mark in marks]
        error = "" if result.error is None else f"{100 * result.error:+.3f} %"
        bytes_text = f"{result.found.nbytes:>+10,} {result.measured or 0:>+10,} {error:>10} {words[0]}"
        print(f"{case.name:<26} {bytes_text}  line {words[1]}  order {words[2]} {result.order}", flush=True)
        if not marks[1]:
            for b in result.found.blames[:3]:
                print(f"      {100 * b.weight:3.0f} %  {b.file}:{b.line} {b.base_line or ''} {b.text}", file=sys.stderr)
    if write:
        write_results(rows)
    print(f"{len(chosen)} pairs: bytes {right[0]}, line {right[1]}, order {right[2]}")


if __name__ == "__main__":
    main()
