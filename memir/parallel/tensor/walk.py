"""How far the division of one dimension reaches through a flat program, tensor by tensor, by the dimension rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Value
from memir.ir.dims import Slot, spread
from memir.ir.reshape import Part
from memir.parallel.shards import in_optimizer
from memir.rewrite.flow import Flow

Crossing = Callable[[int, str], bool]  # (operator, value) -> whether the operator is entered from that value


@dataclass(frozen=True, slots=True)
class Barrier:
    """An operator that cannot work on a part: its position, and why."""

    position: int
    why: str
    unknown: bool = False  # the opcode has no dimension rule


@dataclass(slots=True)
class Reach:
    """What a division reaches: each value's part, the values that become partial sums, and the first barriers."""

    parts: dict[str, Part] = field(default_factory=dict)
    partial: dict[str, int] = field(default_factory=dict)  # value -> the operator that makes it
    barriers: list[Barrier] = field(default_factory=list)
    crossed: set[int] = field(default_factory=set)  # operators


@dataclass(slots=True)
class Graph:
    """A flat program's values, and who makes and reads each."""

    flow: Flow
    values: dict[str, Value] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    kinds: dict[str, Kind] = field(default_factory=dict)  # of storages

    def __post_init__(self) -> None:
        self.values = {v.name: v for v in self.flow.program.values}
        self.kinds = {s.name: s.kind for s in self.flow.program.storages}
        for position, op in enumerate(self.flow.ops):
            self.values.update((r.name, r) for r in op.results)
            for name in dict.fromkeys(op.operands):
                self.readers[name].append(position)

    def operands(self, op: Op) -> list[Value]:
        """Its operands as values."""
        return [self.values[name] for name in op.operands]

    def touching(self, name: str) -> list[int]:
        """The operators outside of the optimizer that make or read the value."""
        made = self.flow.made.get(name)
        found = ([] if made is None else [made]) + self.readers.get(name, [])
        return [p for p in found if not in_optimizer(self.flow.phase[p])]


def walk(graph: Graph, seeds: Iterable[tuple[str, Part]], crosses: Crossing, *, patient: bool = True) -> Reach:
    """Everything that has to be divided when the seeds are. Without `patient` it ends at the first barrier that is known."""
    reach = Reach()
    pending = list(seeds)
    for name, part in pending:
        reach.parts[name] = part
    while pending:
        name, part = pending.pop()
        for position in graph.touching(name):
            if not crosses(position, name):
                continue
            _cross(graph, reach, position, name, part, pending)
            if not patient and any(not b.unknown for b in reach.barriers):
                return reach
    return reach


def _cross(graph: Graph, reach: Reach, position: int, name: str, part: Part, pending: list[tuple[str, Part]]) -> None:
    op = graph.flow.ops[position]
    if op.opcode.startswith("memir."):
        return
    operands = graph.operands(op)
    slots: list[Slot] = [k for k, o in enumerate(op.operands) if o == name]
    slots += [-1 - k for k, r in enumerate(op.results) if r.name == name]
    reach.crossed.add(position)
    for slot in slots:
        found = spread(op, operands, op.results, slot, part)
        if found is None:
            reach.barriers.append(Barrier(position, "has no dimension rule", unknown=True))
            return
        if found.barrier:
            reach.barriers.append(Barrier(position, found.barrier))
            return
        for other in found.partial:
            reach.partial[op.results[-1 - other].name] = position
        for other, theirs in found.parts:
            value = operands[other] if other >= 0 else op.results[-1 - other]
            known = reach.parts.get(value.name)
            if known is None:
                reach.parts[value.name] = theirs
                pending.append((value.name, theirs))
            elif known != theirs:
                reach.barriers.append(Barrier(position, "would be divided in two dimensions"))
                return


def beyond(graph: Graph, barrier: Barrier) -> InconclusiveError:
    """The error for an operator that meets a part that it cannot work on."""
    op = graph.flow.ops[barrier.position]
    where = " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))
    hint = "CONTRIBUTING.md says how to add one to memir/ir/dims.py" if barrier.unknown else ""
    return InconclusiveError(
        f"{op.opcode} {barrier.why}: its operands cannot be divided over the ranks", where=where, hint=hint
    )
