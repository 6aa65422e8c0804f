"""The two sides of a case: what a real step takes, and what memir predicts."""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy_cpu.balance import balance
from benchmarks.accuracy_cpu.cases import Case
from benchmarks.accuracy_cpu.models import CONFIGS, FILES, LOOPS

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Figures:
    """Absolute bytes of one step, and the operator that the peak is reached in; `error` instead where there are none."""

    case: str
    at_start: int = 0
    peak: int = 0
    at_end: int = 0
    peak_op: str = ""
    error: str = ""


@contextmanager
def target_of(case: Case) -> Iterator[tuple[str, dict[str, str]]]:
    """TARGET and `--set` values of a case's model: an example file, or a config.json made for the time being."""
    if case.model in FILES:
        path, sets = FILES[case.model]
        yield str(ROOT / path), dict(sets)
        return
    with tempfile.TemporaryDirectory(prefix="memir-accuracy-") as folder:
        path = str(Path(folder) / "config.json")
        Path(path).write_text(json.dumps(CONFIGS[case.model]), encoding="utf-8")
        yield path, {}


def measured(case: Case) -> Figures:
    """Runs the case for real in this process."""
    from memir.runtime.real import RealStep, measure

    try:
        with target_of(case) as (target, sets):
            step = RealStep(target, case.recipe, case.batch, case.seq, sets)
            found = measure(step, balance) if case.model in LOOPS else measure(step)
    except Exception as error:  # a boundary: any library may raise here; the table shows it
        return Figures(case.name, error=_line(error))
    event = found.peak_event()
    return Figures(case.name, found.at_start, found.peak, found.at_end, event.op if event else "")


def predicted(case: Case) -> Figures:
    """What memir says of the case, at the case's B and S."""
    import memir
    from memir.analysis.liveness import timeline

    try:
        with target_of(case) as (target, sets):
            traced = memir.trace(target, case.recipe, batch=case.batch, seq=case.seq, sets=sets)
        line = timeline(traced.program)
        numbers = line.evaluate({"B": case.batch, "S": case.seq})
    except Exception as error:  # a boundary: whatever fails is a row of the table
        return Figures(case.name, error=_line(error))
    at = numbers.running.index(numbers.peak) if numbers.peak in numbers.running else -1
    end = numbers.after[-1] if numbers.after else numbers.start
    return Figures(case.name, numbers.start, numbers.peak, end, line.steps[at].op.opcode if at >= 0 else "")


def _line(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(frame.filename).name}:{frame.lineno})"
