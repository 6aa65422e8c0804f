"""The speed benchmark: what it measures of a process, how it compares, and that its page says what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.speed import table
from benchmarks.speed.cases import AIMS, GIB, MODELS, SWEEP, Figures, all_cases
from benchmarks.speed.machine import machine, versions
from benchmarks.speed.measure import ROOT, FailedError, Run, run
from memir.sweep.axes import parse_axis


def test_a_process_is_measured_from_outside() -> None:
    """From a small process: this one has imported torch, and counts towards the peak of what it starts (see Run)."""
    command = "import os; text = b'x' * 2**28; print(os.environ['ASKED'])"
    code = (
        "import sys; from benchmarks.speed.measure import run; found = "
        "run((sys.executable, '-c', sys.argv[1]), {'ASKED': 'for'}); print(found.stdout.strip(), found.seconds, found.peak)"
    )
    done = subprocess.run((sys.executable, "-c", code, command), cwd=ROOT, capture_output=True, text=True, check=True)
    stdout, seconds, peak = done.stdout.split()
    assert stdout == "for"
    assert 0 < float(seconds) < 600
    assert 2**28 <= int(peak) < 2**29


def test_a_process_that_fails_is_not_measured() -> None:
    with pytest.raises(FailedError, match=r"exit code 3\nlast words"):
        run((sys.executable, "-c", "import sys; print('last words', file=sys.stderr); sys.exit(3)"), {})


def test_every_aim_compares_cases_that_there_are() -> None:
    names = {case.name for case in all_cases(Path("."))}
    assert {name for aim in AIMS for name in aim.needs} <= names
    assert len(names) == len(all_cases(Path(".")))


def test_the_sweep_has_10_000_points() -> None:
    batches, seqs = parse_axis(SWEEP[1], "--batch"), parse_axis(SWEEP[3], "--seq")
    assert len(batches) * len(seqs) == 10_048


def runs(seconds: dict[str, float], peak: int = GIB) -> dict[str, list[Run]]:
    """Three runs of each case, whose median is the given number of seconds."""
    return {name: [Run(middle * factor, peak, "") for factor in (0.5, 1, 9)] for name, middle in seconds.items()}


SECONDS = {"import torch and llama": 4.0, f"cold {MODELS[0]}": 6.0, f"cold {MODELS[2]}": 9.0}


def test_aims_are_ratios_of_medians() -> None:
    figures = table.figures_of(runs(SECONDS, 3 * GIB))
    assert figures[f"cold {MODELS[0]}"] == Figures(6.0, 3 * GIB)
    found = {aim.text: (aim.value(figures), aim.is_met(figures)) for aim in table.measured_aims(figures)}
    assert found == {
        "cold 8B, in imports of torch and llama": (1.5, True),
        "cold 405B, in cold analyses of 8B": (1.5, False),
        "memory of cold 405B": (3.0, False),
    }


def test_at_least_and_at_most() -> None:
    figures = table.figures_of(runs({f"MemTracker {MODELS[0]}": 30.0, f"cold {MODELS[0]}": 6.0}))
    (aim,) = table.measured_aims(figures)
    assert (aim.value(figures), aim.at_least, aim.is_met(figures)) == (5.0, True, True)


def test_the_printed_lines() -> None:
    assert table.table(runs(SECONDS))[1] == "import torch and llama      4.00   (2.00 to 36.00)         1.00      3"
    aims = [" ".join(line.split()) for line in table.aims(table.figures_of(runs(SECONDS)))]
    assert aims == [
        "cold 8B, in imports of torch and llama 1.50 times at most 2 met",
        "cold 405B, in cold analyses of 8B 1.50 times at most 1.3 NOT met",
        "memory of cold 405B 1.00 GiB at most 2 met",
    ]


def test_results_are_saved_with_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "results.md")
    facts = {"command": "python -m benchmarks.speed", "machine": machine(), "versions": versions(), "sample": "10 of 10 rows"}
    table.save(runs(SECONDS), {**facts, "memtracker": {"MemTracker x": [3.5, 2.25]}})
    document = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert document["cases"]["import torch and llama"] == {"seconds": 4.0, "peak_bytes": GIB, "runs": [2.0, 4.0, 36.0]}
    assert set(document["machine"]) == {"CPU", "cores", "RAM", "system"}
    assert document["versions"]["torch"]
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| cold 8B, in imports of torch and llama | 1.50 times | <= 2 times | yes |" in page
    assert "| cold 405B, in cold analyses of 8B | 1.50 times | <= 1.3 times | **no** |" in page
    assert "- MemTracker x: 3.5, 2.25" in page
    assert document["machine"]["CPU"] in page
