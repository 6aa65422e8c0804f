"""When each gradient is whole: the order in which a backward hands them to what reduces them over the ranks.

Autograd's engine runs a parameter's AccumulateGrad before any other node that is ready (torch/csrc/autograd/engine.h: its
sequence number is the largest), so a gradient is whole once the node that makes it has run: after the last operator of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from memir.ir.core import Kind, Storage
from memir.rewrite.flow import Flow


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient of the step: its storage, its parameter's, and the operator after which it is whole."""

    parameter: Storage
    gradient: Storage
    position: int
    ends: tuple[int, ...] = ()  # the same in each backward phase that adds to it, in order; the last one is `position`


def arrivals(flow: Flow) -> tuple[Arrival, ...]:
    """The step's gradients in the order in which the last backward phase completes them; of one operator, as it lists them."""
    declared = {s.name: s for s in flow.program.storages}
    mine = {s.name for s in flow.program.storages if s.kind == Kind.GRADIENT and s.of is not None and s.name in flow.born}
    written: dict[str, dict[str, tuple[int, int]]] = {}  # gradient -> phase -> (operator, place among its results)
    for position, op in enumerate(flow.ops):
        if flow.phase[position].endswith("backward"):
            for place, value in enumerate(op.results):
                if value.storage in mine:
                    written.setdefault(value.storage, {})[flow.phase[position]] = position, place
    found = []
    for name, phases in written.items():
        of = declared[name].of
        assert of is not None
        ends = tuple(_end(flow, position) for position, _ in phases.values())
        last, place = list(phases.values())[-1]
        found.append((ends[-1], last, place, Arrival(declared[of], declared[name], ends[-1], ends)))
    return tuple(arrival for *_, arrival in sorted(found, key=lambda item: item[:3]))


def _end(flow: Flow, position: int) -> int:
    """The last operator of the node that the operator belongs to, in its phase and without a gap."""
    node, phase = flow.node[position], flow.phase[position]
    while (
        node is not None
        and position + 1 < len(flow.ops)
        and flow.node[position + 1] == node
        and flow.phase[position + 1] == phase
    ):
        position += 1
    return position
