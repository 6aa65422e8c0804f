"""What a check needs to know of a step, as plain data that goes from one process to another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memir.analysis.inventory import round_size, rounded_peak
from memir.analysis.regions import maximum
from memir.diff.inputs import side
from memir.diff.orders import Powers, leading
from memir.diff.side import Side
from memir.errors import MemirError
from memir.hardware import Gpu
from memir.recipe import Recipe

_LAYER = re.compile(r"(.*?\.\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Facts:
    """A step's peak. Bytes; `requested` is what the formula gives, `allocated` is rounded as the allocator rounds."""

    name: str  # of the model
    point: tuple[tuple[str, int], ...]
    requested: int
    allocated: int
    formula: str
    here: str  # the polynomial that is the peak at this point
    orders: tuple[Powers, ...]  # how the peak grows
    phase: str  # of the peak, and its operator
    op: str
    module: str
    source: str
    saved_per_layer: int  # the most that one decoder layer keeps for backward
    saved_in: str  # that layer
    fits: str  # "fits", "tight", "does not fit"; "" where no GPU was named
    needed: tuple[int, int]  # bytes that the process takes on it, from and to
    inconclusive: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]


def facts(target: Any, recipe: Recipe, keywords: Mapping[str, Any], fits: Gpu | None) -> Facts:
    """The facts of a target, or of an nn.Module. Errors are those of `memir.api.program_of`."""
    from memir.api import judge_step, program_of
    from memir.ir.symbolic import formula_text

    found = program_of(target, recipe, **keywords)
    step = side(found.subject.target, found)
    sizes = {s.name: s.nbytes.evaluate(step.point) for s in step.flat.storages}
    steady = [s.name for s in step.flat.storages if s.live_in and s.device == "gpu"]
    allocated = rounded_peak(step.line, sizes, steady, step.point, round_size if recipe.target == "cuda" else None)
    verdict = None if fits is None else judge_step(found, recipe, allocated, fits)
    nbytes, saved_in = saved_per_layer(step)
    envelope = step.formula.total
    requested, piece = envelope.evaluate(step.point)
    if requested != step.line.evaluate(step.point).peak:
        raise MemirError(f"the formula gives {requested} bytes, and the walk does not", where=found.subject.target)
    place = step.peak_moment
    op = step.op(place)
    return Facts(
        name=found.subject.name,
        point=tuple(found.point.items()),
        requested=requested,
        allocated=allocated,
        formula=maximum(envelope),
        here=formula_text(piece.size),
        orders=leading(piece.size for piece in envelope.pieces),
        phase=step.phase(place),
        op=op.opcode if op else "",
        module=op.path if op else "",
        source=op.source if op else "",
        saved_per_layer=nbytes,
        saved_in=saved_in,
        fits="" if verdict is None else verdict.answer,
        needed=(0, 0) if verdict is None else verdict.needed,
        inconclusive=found.inconclusive,
        versions=found.subject.versions,
    )


def saved_per_layer(step: Side) -> tuple[int, str]:
    """The most bytes that autograd keeps of one decoder layer at the end of the forward pass, and that layer's path."""
    steps = step.line.steps
    end = max((i for i, s in enumerate(steps) if s.phase.name.rpartition(".")[2] == "forward"), default=-1)
    total: dict[str, int] = {}
    for live in step.ranges.values():
        if live.made is None or live.made > end or live.saved is None or (live.freed is not None and live.freed <= end):
            continue
        layer = _LAYER.match(steps[live.made].op.path)
        if layer and not live.storage.live_in:
            total[layer[1]] = total.get(layer[1], 0) + live.storage.nbytes.evaluate(step.point)
    largest = max(total.values(), default=0)
    return largest, min((name for name, nbytes in total.items() if nbytes == largest), default="")
