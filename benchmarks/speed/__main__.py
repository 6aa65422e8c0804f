"""`python -m benchmarks.speed [--runs N] [--slow-runs N] [--only WORD] [--save]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.speed.cases import Case, all_cases
from benchmarks.speed.machine import machine, versions
from benchmarks.speed.measure import FailedError, Run, run
from benchmarks.speed.sample import compare
from benchmarks.speed.table import aims, figures_of, measured_aims, save, table

SETTINGS = {"HF_HUB_OFFLINE": "1", "MEMIR_NO_CACHE": ""}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="times each case is run, in turn with the others")
    parser.add_argument("--slow-runs", type=int, default=1, metavar="N", help="the same for MemTracker, which takes minutes")
    parser.add_argument("--only", default="", metavar="WORD", help="only cases with WORD in their name")
    parser.add_argument("--save", action="store_true", help="write results.json and results.md")
    options = parser.parse_args()
    if options.save and options.only:
        parser.error("--save is for all cases")
    with tempfile.TemporaryDirectory(prefix="memir-speed-") as folder:
        cases = [case for case in all_cases(Path(folder)) if options.only in case.name]
        if not cases:
            parser.error(f"no case has {options.only!r} in its name")
        try:
            runs = measure(cases, Path(folder), options.runs, options.slow_runs)
            sample = compared(cases, Path(folder))
        except FailedError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
    figures = figures_of(runs)
    print("\n".join(["", *table(runs), "", *aims(figures), "", f"sweep: {sample}"]))
    if options.save:
        command = f"python -m benchmarks.speed --runs {options.runs} --slow-runs {options.slow_runs} --save"
        facts = {"command": command, "machine": machine(), "versions": versions(), "sample": sample, "memtracker": steps(runs)}
        save(runs, facts)
    met = all(aim.is_met(figures) for aim in measured_aims(figures))
    return 0 if met and "differ" not in sample else 1


def measure(cases: list[Case], folder: Path, count: int, slow_count: int) -> dict[str, list[Run]]:
    """The runs of each case: every case once, then every case again, so that a busy moment meets them all."""
    warm = {"MEMIR_CACHE_DIR": str(folder / "warm")}
    for case in cases:
        if case.cache == "warm":
            say(f"filling the cache for {case.name}")
            run(case.command, {**SETTINGS, **warm})
    runs: dict[str, list[Run]] = {case.name: [] for case in cases}
    for number in range(max(count, slow_count)):
        for case in cases:
            if number >= (slow_count if case.is_slow else count):
                continue
            say(f"{number + 1}: {case.name}")
            if case.cache == "warm":
                runs[case.name].append(run(case.command, {**SETTINGS, **warm}))
            else:
                with tempfile.TemporaryDirectory(dir=folder) as empty:
                    runs[case.name].append(run(case.command, {**SETTINGS, "MEMIR_CACHE_DIR": empty}))
    return runs


def compared(cases: list[Case], folder: Path) -> str:
    """What a sample of the sweep's rows says beside single analyses; empty where there was no sweep."""
    if not (folder / "sweep.csv").exists():
        return "not run"
    say("comparing rows of the sweep with single analyses")
    count, different = compare(folder / "sweep.csv", {**SETTINGS, "MEMIR_CACHE_DIR": str(folder / "warm")})
    if different:
        return f"{len(different)} of {count} rows differ from single analyses: {', '.join(different)}"
    return f"{count} of {count} rows, chosen at random, are those of single analyses"


def steps(runs: Mapping[str, list[Run]]) -> dict[str, list[float]]:
    """MemTracker's own account of its steps, of the last run."""
    return {
        name: json.loads(found[-1].stdout)["step_seconds"]
        for name, found in runs.items()
        if found and name.startswith("MemTracker")
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
