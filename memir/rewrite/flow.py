"""The data flow of a flat program, and autograd's nodes in it.

A forward operator makes an autograd node, which keeps storages (`saves`) until it has run in backward
(torch/csrc/autograd/engine.cpp, call_function: a node runs, then `release_variables`). So the operators of a backward phase are
in groups: those of one node (`forward_of` names its forward operator), what a checkpointed layer runs again, and the additions
by which the engine itself gathers two gradients of one tensor (input_buffer.cpp, InputBuffer::add), which belong to no node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from memir.ir.core import Op, Program

_ADDS = ("aten.add.Tensor", "aten.add_.Tensor")
_FLOATS = ("bf16", "f16", "f32", "f64", "c32", "c64", "c128")  # only these have gradients


def in_place(opcode: str) -> bool:
    """Whether the operator writes into its first operand: PyTorch ends such names in an underscore."""
    parts = opcode.split(".")
    return len(parts) > 1 and parts[1].endswith("_")


@dataclass(slots=True)
class Flow:
    """A flat program as a list of operators, with what each of them is. Positions count operators from 0."""

    program: Program
    ops: list[Op] = field(default_factory=list)
    phase: list[str] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)  # value -> the operator that makes it
    storage: dict[str, str] = field(default_factory=dict)  # value -> its storage
    born: dict[str, int] = field(default_factory=dict)  # storage -> the operator that allocates it
    freed: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    node: list[str | None] = field(default_factory=list)  # autograd's node: the first result of its forward operator
    gradient: list[bool] = field(default_factory=list)  # differentiates: reads a gradient
    repeated: list[bool] = field(default_factory=list)  # a forward operator that checkpointing runs again
    gathers: list[bool] = field(default_factory=list)  # the engine's own addition of two gradients
    group: dict[str, list[int]] = field(default_factory=dict)  # node -> the operators of its backward
    savers: dict[str, list[int]] = field(default_factory=dict)  # storage -> the operators that save it
    segments: list[list[int]] = field(default_factory=list)  # of what checkpointing runs again, one a checkpoint
    checkpoint: dict[int, int] = field(default_factory=dict)  # forward operator -> the segment that runs it again
    _reads: list[frozenset[str]] = field(default_factory=list)  # the storages of each operator's operands

    def __post_init__(self) -> None:
        self.storage = {v.name: v.storage for v in self.program.values}
        alive = {s.name for s in self.program.storages if s.live_in}
        for position, (phase, op) in enumerate(self.program.ops()):
            self.ops.append(op)
            self.phase.append(phase.name)
            for value in op.results:
                self.made[value.name] = position
                self.storage[value.name] = value.storage
                if value.storage not in alive:
                    self.born.setdefault(value.storage, position)
            self._reads.append(frozenset([self.storage[o] for o in op.operands]))
            self.freed.update(dict.fromkeys(op.frees, position))
            self.dropped.update(dict.fromkeys(op.drops, position))
        self._classify()
        self._find_segments()
        groups: dict[str, list[int]] = defaultdict(list)
        savers: dict[str, list[int]] = defaultdict(list)
        for position, op in enumerate(self.ops):
            node = self.node[position]
            if self.gradient[position] and node is not None:
                groups[node].append(position)
            for name in op.saves:
                savers[name].append(position)
        self.group, self.savers = dict(groups), dict(savers)

    def _classify(self) -> None:
        reads = self._gradient_readers()
        again = self._recomputed(reads)
        for position, op in enumerate(self.ops):
            backward = self.phase[position].endswith("backward")
            gathers = position in reads and op.opcode in _ADDS and len(op.operands) == 2 and self._meet(op)
            repeated = position in again
            self.repeated.append(repeated)
            self.gathers.append(gathers)
            inner = backward and not op.opcode.startswith("memir.")  # views of weights, zeros, powers of what was saved
            self.gradient.append((position in reads or inner) and not gathers and not repeated)
            own = op.results[0].name if op.results and self.phase[position].endswith("forward") else op.forward_of
            self.node.append(None if gathers else own)

    def _gradient_readers(self) -> set[int]:
        """The operators that read a gradient: what the loss's own gradient, the first tensor of a backward phase, reaches."""
        found: set[int] = set()
        gradients: set[str] = set()
        begun = ""
        for position, op in enumerate(self.ops):
            phase = self.phase[position]
            if not phase.endswith("backward"):
                continue
            seed = begun != phase and op.opcode.startswith("aten.ones_like")
            begun = phase if seed else begun
            if seed or any(o in gradients for o in op.operands):
                found.add(position)
                gradients |= {r.name for r in op.results}
        return found

    def _recomputed(self, reads: set[int]) -> set[int]:
        """The forward operators that a checkpointed layer runs again: they save, or what they make is read by others of them,
        or they make views beside such: before the last tensor is saved, those of a weight that no `saves` names are made again.
        What nobody reads is run again too, where it stands between others.

        A node's own formula may hold the same operator (the derivative of a power is a power), which does none of these.
        """
        found: set[int] = set()
        unread: set[int] = set()
        wanted: set[str] = set()
        for position in range(len(self.ops) - 1, -1, -1):
            op = self.ops[position]
            if not self.phase[position].endswith("backward") or position in reads or op.forward_of is None:
                continue
            if self.ops[self.made[op.forward_of]].opcode != op.opcode:
                continue
            views = op.results and not in_place(op.opcode) and all(self.born.get(r.storage) != position for r in op.results)
            if op.saves or views or any(r.name in wanted for r in op.results):
                found.add(position)
                wanted |= set(op.operands)
            else:
                unread.add(position)
        runs = [run for run in self._runs(found, reads) if any(self.ops[p].saves for p in run)]
        return {p for run in runs for p in (*run, *(unread & set(range(run[0], run[-1]))))}

    def _runs(self, found: set[int], reads: set[int]) -> list[list[int]]:
        """Positions between which no gradient is computed, together."""
        runs: list[list[int]] = []
        last = -1
        for position in sorted(found):
            if not runs or any(between in reads for between in range(last + 1, position)):
                runs.append([])
            runs[-1].append(position)
            last = position
        return runs

    def _find_segments(self) -> None:
        """Recomputation runs inside the first node of its layer that backward comes to: no gradient is computed between."""
        within = False
        for position in range(len(self.ops)):
            if self.repeated[position]:
                if not within:
                    self.segments.append([])
                within = True
                self.segments[-1].append(position)
                forward = self.ops[position].forward_of
                if forward is not None:
                    self.checkpoint[self.made[forward]] = len(self.segments) - 1
            elif self.gradient[position] or self.gathers[position]:
                within = False

    def _meet(self, op: Op) -> bool:
        """Whether the two operands of an addition come from different nodes, or the first is an older gradient."""
        makers = [self.made.get(o) for o in op.operands]
        if makers[0] is None or not self.phase[makers[0]].endswith("backward"):
            return True
        return self.node[makers[0]] is None or self.node[makers[0]] != op.forward_of or op.opcode == "aten.add_.Tensor"

    def is_forward(self, position: int) -> bool:
        """Whether it computes the loss, for the first time or again."""
        return self.phase[position].endswith("forward") or self.repeated[position]

    def reads(self, position: int) -> frozenset[str]:
        """The storages of its operands."""
        return self._reads[position]

    def requiring(self, parameters: Iterable[str], without: Container[int]) -> set[int]:
        """The forward operators with a result that requires a gradient: what the parameters' storages reach.

        `without`: positions of operators that run under no_grad. A storage that is written again is another node from then on.
        """
        import networkx as nx  # as slow to import as it is seldom needed

        graph: nx.DiGraph[object] = nx.DiGraph()
        version: dict[str, int] = defaultdict(int)
        for position, op in enumerate(self.ops):
            if not self.is_forward(position) or position in without:
                continue
            for name in self.reads(position):
                graph.add_edge((name, version[name]), position)
            for value in op.results:
                if not value.dtype.startswith(_FLOATS):
                    continue
                if in_place(op.opcode):
                    graph.add_edge((value.storage, version[value.storage]), (value.storage, version[value.storage] + 1))
                    version[value.storage] += 1
                graph.add_edge(position, (value.storage, version[value.storage]))
        roots = [(name, 0) for name in parameters if (name, 0) in graph]
        graph.add_edges_from(("trainable", root) for root in roots)
        return {n for n in nx.descendants(graph, "trainable") if isinstance(n, int)} if roots else set()
