"""A changed step made a program again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.opset import scratch_of, scratch_target
from memir.ir.size import ZERO, Size
from memir.rewrite.changes import LISTS, STACKS, Changes, beyond


def rebuilt(changes: Changes, ends: Mapping[str, int | None]) -> tuple[Program, list[int]]:
    """The program, and for each of its operators the position of the one that stood there."""
    return _Rebuilding(changes, ends).run()


View = tuple[str, tuple[Size, ...], tuple[Size, ...], Size, str]


def _view(value: Value) -> View:
    """A value without its name."""
    return value.dtype, value.shape, value.strides, value.offset, value.storage


class _Rebuilding:
    def __init__(self, changes: Changes, ends: Mapping[str, int | None]) -> None:
        self.changes, self.flow, self.ends = changes, changes.flow, ends
        self.program = program = changes.flow.program
        made = {s.name for s in program.storages if s.live_in}
        for position in range(len(self.flow.ops)):
            if position not in changes.removed:
                made |= {r.storage for r in changes.results(position)}
        self.made = made - changes.owned
        self.values = {v.name: v for v in program.values} | {r.name: r for op in self.flow.ops for r in op.results}
        self.stacks: dict[str, Value] = {}  # storages of stacks with fewer tensors -> what they are now
        self.views: dict[View, str] = {}  # a view -> the first name that it has in the new program
        for value in program.values:
            self.views.setdefault(_view(value), value.name)

    def run(self) -> tuple[Program, list[int]]:
        frees: dict[int, list[str]] = defaultdict(list)
        for name, end in self.ends.items():
            if end is not None and name in self.made:
                frees[end].append(name)
        order = {name: k for op in self.flow.ops for k, name in enumerate(op.frees)}
        phases: list[tuple[str, list[Op]]] = []
        origins: list[int] = []
        for position, phase in enumerate(self.flow.phase):
            if not phases or phases[-1][0] != phase:
                phases.append((phase, []))
            op = self._op(position, tuple(sorted(frees.get(position, ()), key=lambda n: order.get(n, 0))))
            if op is not None:
                phases[-1][1].append(op)
                origins.append(position)
        new = replace(
            self.program,
            storages=tuple(self._storage(s) for s in self.program.storages if s.name in self.made),
            values=tuple(v for v in self.program.values if v.storage in self.made and v.name not in self.changes.gone),
            phases=tuple(Phase(name, tuple(ops)) for name, ops in phases),
        )
        return new, origins

    def _op(self, position: int, frees: tuple[str, ...]) -> Op | None:
        """The operator as it is now; where it is gone, and something dies there, a pseudo-operator."""
        op, changes = self.flow.ops[position], self.changes
        if position in changes.removed:
            return Op("memir.free", frees=frees) if frees else None
        results = changes.results(position)
        operands = tuple([self._standing(operand) for operand in op.operands])
        for value in results:
            self.views.setdefault(_view(value), value.name)
        if not changes.gone.isdisjoint(operands):
            if not op.opcode.startswith((*LISTS, *STACKS)):
                raise beyond(op)
            operands = tuple(o for o in operands if o not in changes.gone and self.flow.storage[o] not in changes.frozen)
            if op.opcode.startswith(STACKS):
                results = tuple(replace(r, shape=(Size.of(len(operands)), *r.shape[1:])) for r in results)
                self.stacks |= {r.storage: r for r in results}
        drops = tuple([s for s in op.drops if s in self.made and self._outlives(s, position)]) if op.drops else ()
        if op.opcode in ("memir.free", "memir.alloc") and not (frees or drops or results):
            return None
        saves = changes.saves.get(position, ())
        scratch = self._scratch(op, operands, results)
        if operands == op.operands and results is op.results and (frees, drops, saves) == (op.frees, op.drops, op.saves):
            return op  # nothing is another size where operands and results are the same
        return Op(
            op.opcode, operands, results, frees, drops, saves, scratch, op.stream, op.path, op.source, op.forward_of
        )  # fmt: skip

    def _scratch(self, op: Op, operands: Sequence[str], results: Sequence[Value]) -> Size:
        """The workspace of an operator over a shorter list, by the rule that its own follows."""
        if not op.scratch.terms or len(operands) == len(op.operands):
            return op.scratch
        before = [self.values[name] for name in op.operands]
        target = scratch_target(op, before)
        return scratch_of(target, op.opcode, [self.values[name] for name in operands], results) if target else op.scratch

    def _standing(self, operand: str) -> str:
        """The value to read: one view may go by several names, of which the first may stand in an operator that is gone."""
        now = self.changes.now(operand)
        return self.views.get(_view(self.values[now]), now) if now in self.changes.gone else now

    def _outlives(self, name: str, position: int) -> bool:
        end = self.ends.get(name)
        return end is None or end > position

    def _storage(self, storage: Storage) -> Storage:
        changes, flow = self.changes, self.flow
        end, born = self.ends.get(storage.name), flow.born.get(storage.name)
        if storage.name in changes.empty:
            storage = replace(storage, nbytes=ZERO)
        if storage.name in self.stacks:
            value = self.stacks[storage.name]
            before = self.values[value.name].shape[0].constant
            storage = replace(storage, nbytes=Size.of(storage.nbytes.constant // before * value.shape[0].constant))
        if storage.kind == Kind.ACTIVATION and end is not None and born is not None:
            within = flow.phase[born] == flow.phase[end] and (not flow.repeated[born] or flow.repeated[end])
            if within:
                storage = replace(storage, kind=Kind.TEMPORARY)
        lost = next((name for name in changes.takes_over if changes.heir(name) == storage.name), None)
        if lost is not None:
            was = next(s for s in self.program.storages if s.name == lost)
            storage = replace(was, name=storage.name, nbytes=storage.nbytes)
        return storage
