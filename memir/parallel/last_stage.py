"""The last stage of a pipeline: where its model ends and the loss begins."""

from __future__ import annotations

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Value
from memir.parallel.stages import Stage, Stages


def logits(stages: Stages, part: Stage) -> Value:
    """The output: what the last operator with a parameter makes, in the shape in which it is read on.

    InconclusiveError where that operator is the loss too, so that there is no output.
    """
    storage = stages.flow.storage
    parameters = {s.name for s in stages.flow.program.storages if s.kind == Kind.PARAMETER}
    last = next(
        op
        for op in reversed(part.forward)
        if {storage.get(o) for o in op.operands} & parameters and op.results[0].storage not in parameters
    )
    value = last.results[0]
    view = next((op for op in part.forward if op.operands == (value.name,) and op.results), None)
    if view is not None and view.results[0].storage == value.storage:
        value = view.results[0]
    if len(value.shape) < 2:
        message = "pipeline-parallel: head and loss are one operator, and a stage's output is the logits"
        raise InconclusiveError(message, where=last.opcode, hint="trace it with  --loss model")
    return value


def end_of_model(stages: Stages, part: Stage) -> int:
    """How many operators of the stage's forward make its output; the others are the loss."""
    output = logits(stages, part).name
    return 1 + next(place for place, op in enumerate(part.forward) if any(r.name == output for r in op.results))


def loss_of(stages: Stages, part: Stage) -> tuple[str, ...]:
    """The loss's storage, which the schedule keeps until all micro-batches are through; () where backward has no seed."""
    seed = next((op for op in part.backward if op.opcode.startswith("aten.ones_like")), None)
    return () if seed is None else (stages.values[seed.operands[0]].storage,)
