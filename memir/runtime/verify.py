"""`memir verify`: the step is traced and is run for real, and the two are laid side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memir.analysis.liveness import Timeline, timeline
from memir.api import trace
from memir.errors import InconclusiveError, UsageError
from memir.recipe import Recipe
from memir.runtime.measure import Measured
from memir.runtime.real import RealStep, measure_in_child
from memir.runtime.timelines import Comparison, Extra, compare

TOLERANCE = 1024  # bytes
_LISTED = 8  # differences at the peak that are shown


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the three figures, in absolute bytes."""

    name: str  # "start", "peak", "end"
    predicted: int
    measured: int

    @property
    def error(self) -> int:
        """Predicted minus measured, in bytes."""
        return self.predicted - self.measured


@dataclass(frozen=True, slots=True)
class Verification:
    """A step predicted and measured. `comparison` is None on CUDA, whose counters keep no timeline."""

    target: str
    device: str
    batch: int
    seq: int
    recipe: Recipe
    figures: tuple[Figure, Figure, Figure]
    predicted_at: str  # where the peak is: the operator, module and source line
    measured_at: str  # the operator that the profiler saw there
    comparison: Comparison | None
    assumptions: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]

    def agrees(self, tolerance: int = TOLERANCE) -> bool:
        """Whether all three figures are equal within `tolerance` bytes."""
        return all(abs(figure.error) <= tolerance for figure in self.figures)


def has_cuda() -> bool:
    """Whether there is a CUDA device to run a step on."""
    return torch.cuda.is_available()


def gpu_here() -> str:
    """The compute capability of the CUDA device that a step runs on, "9.0"."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def verify(real: RealStep, progress: Callable[[str], None] = lambda _: None) -> Verification:
    """Predicts the step and runs it on `real.recipe.target`, in a process of its own.

    UsageError: what tracing says, or a step larger than this machine's memory. InconclusiveError: no such device here, the step
    cannot be followed, or the real step died.
    """
    if real.device == "cuda" and not torch.cuda.is_available():
        raise InconclusiveError("no CUDA device here to run the step on", hint="on the CPU, with its kernels:  --target cpu")
    traced = trace(
        real.target,
        real.recipe,
        batch=real.batch,
        seq=real.seq,
        sets=real.sets,
        inputs=real.inputs,
        trust_remote_code=real.trust_remote_code,
        progress=progress,
    )
    line = timeline(traced.program)
    env = {name: value for name, value in (("B", real.batch), ("S", real.seq)) if name in traced.program.dims}
    numbers = line.evaluate(env)
    _refuse_what_does_not_fit(numbers.peak, real.device)
    progress(f"running {real.target} on {real.device}")
    measured = measure_in_child(real)
    progress("comparing the timelines")
    at_end = numbers.after[-1] if numbers.after else numbers.start
    return Verification(
        target=real.target,
        device=real.device,
        batch=real.batch,
        seq=real.seq,
        recipe=real.recipe,
        figures=(
            Figure("start", numbers.start, measured.at_start),
            Figure("peak", numbers.peak, measured.peak),
            Figure("end", at_end, measured.at_end),
        ),
        predicted_at=_place(line, numbers.running.index(numbers.peak) if numbers.peak in numbers.running else -1),
        measured_at=_measured_place(measured),
        comparison=compare(traced.program, env, measured) if measured.timeline else None,
        assumptions=tuple(traced.assumptions),
        versions=(("torch", torch.__version__),),
    )


def _refuse_what_does_not_fit(peak: int, device: str) -> None:
    on_cpu = device == "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if on_cpu else torch.cuda.mem_get_info()[0]
    if peak > memory:
        raise UsageError(
            f"the step takes {peak / 2**30:,.2f} GiB, more than the {memory / 2**30:,.2f} GiB of memory here",
            hint="fewer layers say as much:  --set num_hidden_layers=2  (or a smaller -b or -s)",
        )


def _place(line: Timeline, index: int) -> str:
    if index < 0:
        return "the start of the step"
    op = line.steps[index].op
    return "  ".join(filter(None, (op.opcode, op.path, op.source)))


def _measured_place(measured: Measured) -> str:
    event = measured.peak_event()
    if event is not None:
        return event.op or "Python"
    return "the start of the step" if measured.timeline else ""


def to_data(found: Verification, tolerance: int = TOLERANCE) -> dict[str, Any]:
    """The same as plain data for JSON. All figures are bytes; errors are predicted minus measured."""
    comparison = found.comparison
    return {
        "schema_version": 1,
        "target": found.target,
        "device": found.device,
        "batch": found.batch,
        "seq": found.seq,
        "recipe": asdict(found.recipe),
        "versions": dict(found.versions),
        "agrees": found.agrees(tolerance),
        "tolerance_bytes": tolerance,
        "figures": {
            f.name: {"predicted_bytes": f.predicted, "measured_bytes": f.measured, "error_bytes": f.error}
            for f in found.figures
        },
        "peak": {"predicted_at": found.predicted_at, "measured_at": found.measured_at},
        "timelines": None if comparison is None else asdict(comparison),
        "assumptions": list(found.assumptions),
    }


def to_text(found: Verification, tolerance: int = TOLERANCE) -> str:
    """One screen for people."""
    lines = [f"{found.target}   B={found.batch} S={found.seq}   on {found.device}", ""]
    lines.append(f"  {'bytes':8} {'predicted':>18} {'measured':>18} {'error':>14}")
    for f in found.figures:
        percent = f"  {100 * f.error / f.measured:+.4f} %" if f.measured and f.error else ""
        lines.append(f"  {f.name:8} {f.predicted:>18,} {f.measured:>18,} {f.error:>+14,}{percent}")
    lines += ["", f"  peak predicted at  {found.predicted_at}"]
    if found.measured_at:
        lines.append(f"       measured at   {found.measured_at}")
    if found.comparison is not None:
        lines += ["", *_timeline_lines(found.comparison, found.figures[1].error)]
    worst = max(abs(f.error) for f in found.figures)
    agrees = f"agrees within {tolerance:,} bytes" if found.agrees(tolerance) else f"differs by up to {worst:,} bytes"
    lines += ["", f"  {agrees if worst else 'exact'}"]
    lines += [f"  assumed: {text}" for text in found.assumptions]
    return "\n".join(lines)


def _timeline_lines(comparison: Comparison, error: int) -> list[str]:
    lines = [
        f"  timelines: {comparison.num_matched:,} of {comparison.num_predicted:,} predicted allocations were made, in order;"
        f" kernels' workspaces were {comparison.num_workspaces:,} more"
    ]
    if comparison.first:
        head, *rest = comparison.first.splitlines()
        lines += [f"  first difference: {head}", *(f"    {line}" for line in rest)]
    else:
        lines.append("  no difference in them but scalars and workspaces")
    if error:
        lines.append("  the error at the peak:")
        lines += [f"    {_extra_line(extra)}" for extra in comparison.at_peak[:_LISTED]]
        rest_of = comparison.at_peak[_LISTED:]
        if rest_of:
            lines.append(f"    {sum(e.nbytes for e in rest_of):>+14,}  in {len(rest_of)} smaller ones")
    return lines


def _extra_line(extra: Extra) -> str:
    side = "predicted" if extra.nbytes > 0 else "measured"
    what = (extra.predicted if extra.nbytes > 0 else extra.measured) or "Python"
    other = extra.measured if extra.nbytes > 0 else extra.predicted
    return f"{extra.nbytes:>+14,}  {side} only, {extra.count} x {what}" + (f"; {other}" if other else "")
