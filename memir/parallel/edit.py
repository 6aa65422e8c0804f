"""Edits of a flat program, collected and then applied at once: operators put in, storages resized, ends moved.

Every position is one of `flow`, the program before the edits. The result comes with each operator's origin, the position
beside which it stands, as memir.rewrite.lift wants it: an operator put before or after another belongs to the same layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memir.ir.core import Op, Phase, Program, Storage, Value
from memir.ir.size import Size
from memir.rewrite.flow import Flow


@dataclass(slots=True)
class Edit:
    """What changes in `flow`'s program. Nothing is changed before `applied`."""

    flow: Flow
    ops: dict[int, Op | None] = field(default_factory=dict)  # position -> the operator that stands there now; None: none
    ahead: dict[int, list[Op]] = field(default_factory=lambda: defaultdict(list))
    behind: dict[int, list[Op]] = field(default_factory=lambda: defaultdict(list))
    storages: dict[str, Storage | None] = field(default_factory=dict)  # name -> what is declared now; None: no more
    added: list[Storage] = field(default_factory=list)
    values: dict[str, Value | None] = field(default_factory=dict)  # of those before the first operator
    added_values: list[Value] = field(default_factory=list)
    declared: dict[str, Storage] = field(default_factory=dict)  # by name, as they were declared first

    def __post_init__(self) -> None:
        self.declared = {s.name: s for s in self.flow.program.storages}

    def op(self, position: int) -> Op:
        """The operator as it stands now; ValueError if it is gone."""
        op = self.ops.get(position, self.flow.ops[position])
        if op is None:
            raise ValueError(f"operator {position} is gone")
        return op

    def put(self, position: int, op: Op | None) -> None:
        """Another operator in that place; with None, none, and its frees are lost: give them to another."""
        self.ops[position] = op

    def before(self, position: int, *ops: Op) -> None:
        """Operators ahead of that one, after those that were put there before."""
        self.ahead[position] += ops

    def after(self, position: int, *ops: Op) -> None:
        """Operators behind that one, after those that were put there before."""
        self.behind[position] += ops

    def storage(self, name: str) -> Storage:
        """A storage of the program as it is declared now. KeyError if there is none."""
        return self.storages.get(name) or self.declared[name]

    def declare(self, storage: Storage) -> str:
        """A new storage; its name."""
        self.added.append(storage)
        self.declared[storage.name] = storage
        return storage.name

    def resize(self, name: str, nbytes: Size) -> None:
        """The storage requests other bytes; the values in it are the caller's business."""
        self.storages[name] = replace(self.storage(name), nbytes=nbytes)

    def forget(self, name: str) -> None:
        """The storage is not declared any more."""
        self.storages[name] = None

    def take_free(self, name: str) -> int | None:
        """Takes the free of a storage from the operator that has it; its position, None where nothing frees it."""
        position = self.flow.freed.get(name)
        if position is not None:
            self._without(position, name)
        return position

    def free_after(self, name: str, position: int) -> None:
        """The storage dies after that operator, and not where it died before."""
        self.take_free(name)
        op = self.op(position)
        self.ops[position] = replace(op, frees=(*op.frees, name))

    def rename(self, position: int, names: Mapping[str, str]) -> None:
        """The operator reads other values in the place of some."""
        op = self.op(position)
        self.ops[position] = replace(op, operands=tuple(names.get(o, o) for o in op.operands))

    def retype(self, position: int, results: Mapping[str, Value]) -> None:
        """The operator makes other values in the place of some of its results, by their names."""
        op = self.op(position)
        self.ops[position] = replace(op, results=tuple(results.get(r.name, r) for r in op.results))

    def applied(self, mesh: Iterable[tuple[str, Size]] = ()) -> tuple[Program, list[int]]:
        """The new program, with `mesh` axes more, and for each of its operators the position of its origin."""
        flow = self.flow
        phases: list[tuple[str, list[Op]]] = []
        origins: list[int] = []
        for position, phase in enumerate(flow.phase):
            if not phases or phases[-1][0] != phase:
                phases.append((phase, []))
            own = self.ops.get(position, flow.ops[position])
            if own is not None and own.opcode == "memir.free" and not own.frees:
                own = None  # all that it freed dies elsewhere now
            here = [*self.ahead.get(position, ()), *([] if own is None else [own]), *self.behind.get(position, ())]
            phases[-1][1].extend(here)
            origins += [position] * len(here)
        program = flow.program
        new = replace(
            program,
            mesh=(*program.mesh, *mesh),
            storages=(*self._kept(program.storages), *self._kept(self.added)),
            values=(*(now for v in program.values if (now := self.values.get(v.name, v)) is not None), *self.added_values),
            phases=tuple(Phase(name, tuple(ops)) for name, ops in phases),
        )
        return new, origins

    def _kept(self, storages: Sequence[Storage]) -> list[Storage]:
        return [now for s in storages if (now := self.storages.get(s.name, s)) is not None]

    def _without(self, position: int, name: str) -> None:
        op = self.ops.get(position, self.flow.ops[position])
        if op is not None:
            self.ops[position] = replace(op, frees=tuple(f for f in op.frees if f != name))
