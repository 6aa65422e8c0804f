"""A step written down for the first, the second and the last of repeated layers, made one for all of them.

Operators over lists take ranges of members. Operators in a layer's turn stay for the first layer and become the body of a
Repeat for the others; the last layer's have to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError
from memir.ir.core import Op, Repeat, Storage, Value
from memir.ir.names import index_text, join, split
from memir.ir.size import ZERO, Size
from memir.updates.tape import Family, Member, Place, Tape

_LISTS = ("aten._foreach_", "aten._fused_")
INDEX = "i"  # of the Repeats


@dataclass(frozen=True, slots=True)
class Turn:
    """What a name of one of three layers is: of the first (0), the second or the last; its index is the layer's and `offset`.

    `ranged`: the index that stands for all layers, where this name stands in a list; None where another layer's does.
    """

    unit: int
    offset: Size
    ranged: str | None


@dataclass(slots=True)
class Layers:
    """What is on a tape, as part of a program whose layers repeat. `members`: all that were updated."""

    tape: Tape
    members: Sequence[Member]
    turns: dict[str, Turn]  # of parameters and gradients

    def ops(self) -> list[Op | Repeat]:
        """The operators. InconclusiveError where the layers' turns differ."""
        result: list[Op | Repeat] = []
        ops, places = self.tape.done(), self.tape.places
        at = 0
        while at < len(ops):
            place = places[at]
            if place is None:
                result.append(self._listed(ops[at]))
                at += 1
                continue
            end = at
            while end < len(ops) and _same(places[end], place):
                end += 1
            turns = [[op for op, p in zip(ops[at:end], places[at:end], strict=True) if p and p[1] == unit] for unit in range(3)]
            result += self._repeated(turns, place[0])
            at = end
        return result

    def storages(self) -> list[Storage]:
        """Of states and temporaries: one declaration for all layers."""
        made = []
        for storage in self.tape.storages:
            family, unit = self._family(storage.name)
            if family is None:
                made.append(storage)
            elif unit == 0:
                of = None if storage.of is None else family.owner
                made.append(replace(storage, name=join(split(storage.name)[0], (family.extent,)), of=of))
        return made

    def values(self) -> list[Value]:
        """Of states."""
        made = []
        for value in self.tape.values:
            family, unit = self._family(value.name)
            if family is None:
                made.append(value)
            elif unit == 0:
                name = join(split(value.name)[0], (family.extent,))
                made.append(replace(value, name=name, storage=name))
        return made

    def _family(self, name: str) -> tuple[Family | None, int]:
        """The layers that a state or a temporary is of, and which of the three; no layers for any other."""
        member = self.tape.owners.get(name)
        if member is None or member.family is None or member.place is None:
            return None, 0
        return member.family, member.place[1]

    def _turn(self, name: str) -> Turn | None:
        family, unit = self._family(name)
        if family is None:
            return self.turns.get(name)
        return Turn(unit, ZERO, f":{index_text(family.count)}" if unit == 0 else None)

    def _range(self, name: str) -> str | None:
        """The range of all layers in place of the first one's name, None for the others'; other names stay."""
        turn = self._turn(name)
        if turn is None:
            return name
        return None if turn.ranged is None else join(split(name)[0], (turn.ranged,))

    def _ranges(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in map(self._range, names) if name is not None)

    def _listed(self, op: Op) -> Op:
        results = []
        for value in op.results:
            name, storage = self._range(value.name), self._range(value.storage)
            if name is not None and storage is not None:
                results.append(replace(value, name=name, storage=storage))
        frees = self._freed(op.frees)
        if not op.opcode.startswith(_LISTS):  # a list's last operator may be followed by one on a single tensor
            return replace(op, frees=frees)
        return replace(op, operands=self._ranges(op.operands), results=tuple(results), frees=frees)

    def _freed(self, names: Sequence[str]) -> tuple[str, ...]:
        """All layers' tensors of one kind together are a range; one alone is the last layer's."""
        units: dict[str, set[int]] = {}
        for name in names:
            turn = self._turn(name)
            units.setdefault(split(name)[0], set()).add(-1 if turn is None else turn.unit)
        kept = []
        for name in names:
            if len(units[split(name)[0]]) == 1:
                kept.append(name)
            elif units[split(name)[0]] < {0, 1}:
                raise InconclusiveError("some layers' temporaries outlive others'", where=f"${name}")
            else:
                kept += self._ranges([name])
        return tuple(kept)

    def _repeated(self, turns: Sequence[Sequence[Op]], stretch: int) -> list[Op | Repeat]:
        first, second, last = turns
        family = next(m.family for m in self.members if m.place is not None and m.place[0] == stretch)
        assert family is not None
        index = Size.of(INDEX) + 1
        body = tuple(self._at(op, 1, index) for op in second)
        if body == tuple(self._at(op, 2, index) for op in last):
            return [*first, Repeat(INDEX, family.count - 1, body)]
        if [_alive(op) for op in body] != [_alive(self._at(op, 2, index)) for op in last]:
            raise InconclusiveError("the optimizer's step is not the same for all layers", where=self.tape.source)
        return [*first, Repeat(INDEX, family.count - 2, body), *(self._at(op, 2, family.count - 1) for op in last)]

    def _at(self, op: Op, unit: int, index: Size) -> Op:
        """An operator of that layer's turn, with `index` as the number of that layer."""

        def moved(name: str) -> str:
            turn = self._turn(name)
            if turn is None:
                return name
            return join(split(name)[0], (index_text(index + (turn.unit - unit) + turn.offset),))

        results = tuple(replace(r, name=moved(r.name), storage=moved(r.storage)) for r in op.results)
        return replace(op, operands=tuple(map(moved, op.operands)), results=results, frees=tuple(map(moved, op.frees)))


def _alive(op: Op) -> Op:
    """What has to be the same for all layers; the last one's temporaries may end elsewhere, its gradient may lie elsewhere."""
    return replace(op, operands=(), frees=())


def _same(a: Place | None, b: Place) -> bool:
    return a is not None and a[0] == b[0]
