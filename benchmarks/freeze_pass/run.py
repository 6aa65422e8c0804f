"""The two sides of a case: what a real step takes with the part really frozen, and what the pass makes of one trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from benchmarks.accuracy_cpu.models import FILES
from benchmarks.freeze_pass.cases import BATCH, SEQ, Case, target
from memir.ir.core import Program

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("forward", "backward", "optimizer")
_MARK = "phase "
Adjust = Callable[[nn.Module], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """Absolute bytes of one step: live at its start, at most in each of PHASES, live at its end; or an error."""

    case: str
    at_start: int = 0
    peaks: tuple[int, ...] = ()
    at_end: int = 0
    error: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.at_start, *self.peaks, self.at_end)


@contextmanager
def _target(model: str) -> Iterator[tuple[str, dict[str, str]]]:
    what, sets = target(model)
    if model in FILES:
        yield str(ROOT / str(what)), sets
        return
    with tempfile.TemporaryDirectory(prefix="memir-freeze-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(what), encoding="utf-8")
        yield str(path), sets


def measured(case: Case, adjust: Adjust | None = None) -> Figures:
    """Runs the case for real in this process, which has run nothing else; `adjust` freezes otherwise than the case says."""
    import torch

    from benchmarks.freeze_pass.frozen import freeze_cut, freeze_pattern
    from memir.errors import MemirError
    from memir.frontend.quiet import quiet
    from memir.runtime.measure import measure_cpu
    from memir.runtime.real import RealStep, builder

    def freeze(module: nn.Module) -> None:
        if adjust is not None:
            adjust(module)
        elif case.pattern:
            freeze_pattern(module, case.pattern)
        else:
            freeze_cut(module, case.cut)

    marks: list[torch.profiler.record_function] = []

    def close() -> None:
        while marks:
            marks.pop().__exit__(None, None, None)

    def on_phase(name: str) -> None:
        close()
        marks.append(torch.profiler.record_function(_MARK + name))
        marks[-1].__enter__()

    torch.set_num_threads(1)
    try:
        with _target(case.model) as (path, sets), quiet():
            build = builder(RealStep(path, case.recipe, BATCH, SEQ, sets), freeze, on_phase)

            def build_marked() -> Callable[[], None]:
                step = build()

                def run() -> None:
                    step()
                    close()

                return run

            found = measure_cpu(build_marked)
    except MemirError as error:
        return Figures(case.name, error=error.render())
    peaks = dict.fromkeys(PHASES, 0)
    before = found.at_start
    for event in found.timeline:
        phase = next((op for op in event.ops if op.startswith(_MARK)), "").rpartition(".")[2].removeprefix(_MARK)
        if phase:
            peaks[phase] = max(peaks[phase], before, event.total)
        before = event.total
    return Figures(case.name, found.at_start, tuple(peaks.values()), found.at_end)


def predicted(cases: Sequence[Case]) -> list[Figures]:
    """What the pass makes of one trace, for cases of one model and recipe."""
    import memir
    from memir.errors import MemirError

    try:
        with _target(cases[0].model) as (path, sets):
            program = memir.trace(path, cases[0].recipe, batch=BATCH, seq=SEQ, sets=sets).program
    except MemirError as error:
        return [Figures(case.name, error=error.render()) for case in cases]
    return [_figures(case, program) for case in cases]


def _figures(case: Case, program: Program) -> Figures:
    from memir.analysis.liveness import timeline
    from memir.errors import MemirError
    from memir.ir.verify import verify
    from memir.passes.freeze import Freeze

    try:
        frozen = Freeze(cut=case.cut, pattern=case.pattern).run(program)
        verify(frozen)
    except MemirError as error:
        return Figures(case.name, error=error.render())
    line = timeline(frozen)
    numbers = line.evaluate({"B": BATCH, "S": SEQ})
    peaks = dict.fromkeys(PHASES, 0)
    for step, running in zip(line.steps, numbers.running, strict=True):
        phase = step.phase.name.rpartition(".")[2]
        peaks[phase] = max(peaks[phase], running)
    return Figures(case.name, numbers.start, tuple(peaks.values()), numbers.after[-1])
