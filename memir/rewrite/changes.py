"""What a rewrite changes in a flat program, before the program is made anew."""

from __future__ import annotations

from dataclasses import dataclass, field

from memir.errors import InconclusiveError
from memir.ir.core import Op, Value
from memir.rewrite.flow import Flow, in_place

LISTS = ("aten._foreach_", "aten._fused_")  # operators over lists of tensors, of which one parameter more or less may be there
STACKS = ("aten.stack", "aten.cat")  # whose result has a size with their number


@dataclass(slots=True)
class Changes:
    """Operators that are gone, and what stands in their results' places. Positions are those of `flow`."""

    flow: Flow
    frozen: frozenset[str]  # parameters' storages
    owned: frozenset[str] = frozenset()  # storages of the frozen parameters' gradients and states, which are gone
    removed: set[int] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)  # values that are not made any more
    alias: dict[str, str] = field(default_factory=dict)  # a value -> the one that stands in its place
    takes_over: dict[str, str] = field(default_factory=dict)  # a storage -> the one that lies in its place
    kept_results: dict[int, tuple[Value, ...]] = field(default_factory=dict)  # of operators that keep only some
    empty: set[str] = field(default_factory=set)  # storages that have no byte any more
    saves: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owned = frozenset(s.name for s in self.flow.program.storages if s.of in self.frozen)

    def remove(self, position: int) -> None:
        """The operator is not executed; what it makes is gone, unless something stands in its place."""
        self.removed.add(position)
        self.gone |= {r.name for r in self.flow.ops[position].results if r.name not in self.alias}

    def keep_results(self, position: int, kept: tuple[Value, ...]) -> None:
        """The operator makes these of its results only."""
        self.kept_results[position] = kept
        self.gone |= {r.name for r in self.flow.ops[position].results} - {r.name for r in kept}

    def pass_through(self, position: int, kept: str) -> None:
        """An addition that loses one operand: the other one is its result."""
        op = self.flow.ops[position]
        result = op.results[0]
        self.removed.add(position)
        self.alias[result.name] = self.now(kept)
        if self.flow.storage[kept] != result.storage:
            self.takes_over[result.storage] = self.flow.storage[kept]
            if in_place(op.opcode):
                self.alias[op.operands[0]] = self.now(kept)

    def now(self, value: str) -> str:
        """The value that stands in this one's place."""
        while value in self.alias:
            value = self.alias[value]
        return value

    def heir(self, storage: str) -> str:
        """The storage that lies in this one's place."""
        while storage in self.takes_over:
            storage = self.takes_over[storage]
        return storage

    def results(self, position: int) -> tuple[Value, ...]:
        """What the operator still makes."""
        return self.kept_results.get(position, self.flow.ops[position].results)


def beyond(op: Op) -> InconclusiveError:
    """The error for an operator that is left without an operand."""
    where = " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))
    return InconclusiveError("memir cannot tell what this operator does when some of its operands are frozen", where=where)
