"""What is wrong with a list of distributed methods before any step is traced: their order, and what does not go together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from memir.errors import UsageError

# within a layer; the split into stages; copies of the model: as torchtitan applies them, from left to right
_WITHIN, _STAGES, _COPIES = range(3)
_PLACES = {
    "tensor-parallel": _WITHIN,
    "context-parallel": _WITHIN,
    "expert-parallel": _WITHIN,
    "pipeline-parallel": _STAGES,
    "data-parallel": _COPIES,
    "zero": _COPIES,
    "fsdp": _COPIES,
    "fsdp1": _COPIES,
}


def check_together(passes: Sequence[Any], accumulate: int = 1) -> None:
    """UsageError for methods in another order than the one in which they are applied, and for a pipeline of a step of several
    micro-batches, which are the pipeline's own."""
    methods = [one for one in passes if one.name in _PLACES]
    ordered = sorted(methods, key=lambda one: _PLACES[one.name])
    if ordered != methods:
        late, early = next((a, b) for a, b in pairwise(methods) if _PLACES[a.name] > _PLACES[b.name])
        raise UsageError(
            f"--parallel: {early.name} after {late.name}; methods are applied from left to right, what is within a layer first",
            hint="the order: tensor-parallel, context-parallel, expert-parallel, then pipeline-parallel, then the copies\n"
            f"of the model; here  {', '.join(one.name for one in ordered)}",
        )
    pipeline = next((one for one in methods if one.name == "pipeline-parallel" and one.degree != 1), None)
    if pipeline is not None and accumulate > 1:
        raise UsageError(
            f"--accumulate {accumulate} with a pipeline: its micro-batches are the pipeline's own",
            hint=f"--parallel 'pipeline-parallel{{degree={pipeline.degree} microbatches={accumulate}}}'",
        )
