"""What a candidate takes at least and how fast it can be at most, before any pass of its methods runs.

Bytes: when the optimizer steps a rank holds its parts of parameters, gradients and states; when the forward is through, its
parts of parameters and states and what the forward saved, of which methods that copy the model divide nothing. Speed: the
computing of one GPU, divided without loss, nothing communicated, and a pipeline's idle time.
"""

from __future__ import annotations

from memir.analysis.cost.device import Device
from memir.analysis.cost.step import bubble_of
from memir.analysis.frames import frames_of
from memir.errors import UsageError
from memir.planner.facts import Facts
from memir.planner.space import CHECKPOINTS, Candidate, Layout
from memir.planner.variant import SOME, Variants


class Bounds:
    """The bounds of one traced step's candidates at one sequence length."""

    def __init__(self, facts: Facts, device: Device, seq: int, variants: Variants) -> None:
        self.facts, self.device, self.seq, self.variants = facts, device, seq, variants
        self._saved: dict[tuple[str, int], int] = {}
        self._seconds: dict[tuple[str, int], tuple[float, float]] = {}

    def nbytes(self, candidate: Candidate) -> int:
        """Requested bytes of a rank at least."""
        parameters, gradients, states = self._static(candidate.layout)
        held = parameters + gradients + states
        if candidate.batch < SOME:
            return int(held)
        degrees = candidate.layout.degrees
        inner = degrees.tensor * degrees.context * degrees.pipeline * degrees.expert
        return int(max(held, parameters + states + self._saved_at(candidate.checkpoint, candidate.batch) / inner))

    def seconds(self, candidate: Candidate) -> float:
        """A step at least."""
        degrees = candidate.layout.degrees
        inner = degrees.tensor * degrees.context * degrees.pipeline
        micro, optimizer = self._computing(candidate.checkpoint, candidate.batch)
        idle = bubble_of(degrees.pipeline) if degrees.pipeline > 1 else 0.0
        stepping = 0.0 if candidate.layout.offloads else optimizer / degrees.ranks
        return micro * (candidate.accumulate + idle) / inner + stepping

    def _static(self, layout: Layout) -> tuple[float, float, float]:
        whole = (self.facts.parameters, self.facts.gradients, self.facts.states)
        parts = [float(number) for number in whole]
        for method in (*layout.inner, *([layout.copies] if layout.copies else [])):
            degree = getattr(layout.degrees, method.axis)
            left = 0.0 if method.offloads else 1 / degree  # of what is divided, on the GPU
            parts = [part * left if divided else part for part, divided in zip(parts, method.static, strict=True)]
        return parts[0], parts[1], parts[2]

    def _saved_at(self, checkpoint: str, batch: int) -> int:
        """Bytes that the forward leaves behind, on one GPU."""
        key = (checkpoint, batch)
        if key not in self._saved:
            variant = self.variants.get(CHECKPOINTS[checkpoint], SOME, 1)
            if not variant.programs:
                raise UsageError(variant.failure)
            program = variant.programs[0]
            _, line = frames_of(program)
            last = max(i for i, step in enumerate(line.steps) if step.phase.name.endswith("forward"))
            env = {"B": batch, "S": self.seq, **variant.fixed}
            saved, start = line.size(line.after[last]), line.size(line.start)
            self._saved[key] = (saved - start).evaluate({name: env[name] for name in program.dims})
        return self._saved[key]

    def _computing(self, checkpoint: str, batch: int) -> tuple[float, float]:
        key = (checkpoint, batch)
        if key not in self._seconds:
            variant = self.variants.get(CHECKPOINTS[checkpoint], SOME, 1)
            found = variant.parts(batch, self.seq, self.device, self.facts.layers, 1)
            self._seconds[key] = found.forward.total + found.backward.total, found.optimizer.total
        return self._seconds[key]
