"""What belongs to which repeating unit: the stretches of operators, and families of the storages and values they make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from memir.errors import MemirError
from memir.frontend.layout import Layout
from memir.ir.core import Op, Program, Storage, Value
from memir.ir.names import star


class FoldError(MemirError):
    """The layers do not repeat as far as memir can follow: the step is traced in full."""


@dataclass(frozen=True, slots=True)
class Member:
    """One unit's member of a family."""

    family: Hashable
    unit: int


Ref = Member | str  # a member, or the name of what belongs to no unit


@dataclass(slots=True)
class Sweep:
    """One pass over all units in a phase: where each unit's operators begin, in order of execution."""

    starts: list[int]
    ascending: bool
    length: int  # operators of a repeated unit
    matched: set[int] = field(default_factory=set)  # units whose operators are those of a repeated one

    def unit(self, which: int) -> int:
        """The unit that runs as the `which`-th."""
        return which if self.ascending else len(self.starts) - 1 - which

    def unit_at(self, position: int) -> int | None:
        """The unit that an operator belongs to, if its operators are those of a repeated one."""
        for which, start in enumerate(self.starts):
            if start <= position < start + self.length:
                unit = self.unit(which)
                return unit if unit in self.matched else None
        return None


OVER_LISTS = ("aten._foreach_", "aten._fused_")


def layers_of(program: Program, layout: Layout) -> list[int | None]:
    """The layer that each operator runs in; of one without a module the layer whose parameters it works on (an optimizer's).

    An operator over lists belongs to none, even where all of its list is one layer's.
    """
    owner = {s.name: layout.layer(s.name) if s.of is None else layout.layer(s.of) for s in program.storages}
    storage_of = {v.name: v.storage for v in program.values}
    layers: list[int | None] = []
    for _, op in program.ops():
        storage_of.update({r.name: r.storage for r in op.results})
        if op.path or op.opcode.startswith(OVER_LISTS):
            layers.append(layout.layer(op.path))
            continue
        found = {owner[storage_of[operand]] for operand in op.operands} - {None}
        layers.append(found.pop() if len(found) == 1 else None)
    return layers


class Families:
    """Reads the units out of a flat program. FoldError if a phase does not go through them in order."""

    def __init__(self, program: Program, layout: Layout, peel: int) -> None:
        self.layout, self.peel = layout, peel
        self.inner = range(peel, layout.units - peel)
        self.ops: list[Op] = []
        self._declared = {s.name: s for s in program.storages}
        self._born: dict[str, int] = {}
        self._made: dict[str, Value] = {v.name: v for v in program.values}
        live = {s.name for s in program.storages if s.live_in}
        for position, (_, op) in enumerate(program.ops()):
            self.ops.append(op)
            for value in op.results:
                self._made[value.name] = value
                if value.storage not in live and value.storage not in self._born:
                    self._born[value.storage] = position
        self._layers = layers_of(program, layout)
        self.sweeps: list[Sweep] = []
        position = 0
        for phase in program.phases:
            self.sweeps += self._sweeps(phase.name, position, position + len(phase.ops))
            position += len(phase.ops)
        self._storages: dict[str, Member] = {}
        self._values: dict[str, Member] = {}
        self._spans: dict[Hashable, tuple[int, int]] = {}
        self._bases: dict[Hashable, str] = {}
        self._assign(program)
        self._name_views(program)

    def storage(self, name: str) -> Ref:
        """The member that a storage is, or its name."""
        return self._storages.get(name, name)

    def value(self, name: str) -> Ref:
        """The member that a value is, or its name."""
        return self._values.get(name, name)

    def span(self, family: Hashable) -> tuple[int, int]:
        """The first and the last unit that have a member."""
        return self._spans[family]

    def base(self, family: Hashable) -> str:
        """The family's name, without an index."""
        return self._bases[family]

    # -- views

    def _name_views(self, program: Program) -> None:
        """One view may go by several names: an operand takes the one made in its own unit, or else the first.

        Backward finds what forward saved by its storage and shape, and so names the last of several equal views, of whatever
        layer: a table of cosines that every layer unsqueezes.
        """
        made: dict[Value, list[tuple[int | None, str]]] = defaultdict(list)
        views: dict[str, Value] = {}
        for value in program.values:
            views[value.name] = replace(value, name="")
            made[views[value.name]].append((None, value.name))
        units: list[int | None] = [None] * len(self.ops)
        for sweep in self.sweeps:
            for position in range(sweep.starts[0], min(sweep.starts[-1] + sweep.length, len(self.ops))):
                units[position] = sweep.unit_at(position)
        for position, op in enumerate(self.ops):
            unit = units[position]
            operands = []
            for operand in op.operands:
                names = made[views[operand]]
                own = next((name for at, name in reversed(names) if at == unit), None) if unit is not None else None
                operands.append(own or names[0][1])
            self.ops[position] = replace(op, operands=tuple(operands))
            for value in op.results:
                view = views[value.name] = replace(value, name="")
                made[view].append((unit, value.name))

    # -- stretches

    def _unit(self, position: int) -> int | None:
        layer = self._layers[position]
        number = -1 if layer is None else layer - self.layout.lead
        return number // self.layout.period if 0 <= number < self.layout.period * self.layout.units else None

    def _sweeps(self, phase: str, start: int, end: int) -> list[Sweep]:
        runs: list[tuple[int, int]] = []  # unit, first operator
        for position in range(start, end):
            unit = self._unit(position)
            if unit is not None and (not runs or runs[-1][0] != unit):
                runs.append((unit, position))
        n = self.layout.units
        sweeps = []
        while runs:
            units = [unit for unit, _ in runs[:n]]
            if units not in (list(range(n)), list(range(n - 1, -1, -1))):
                raise FoldError(f"the {phase} does not go through the layers one after another: {units}")
            sweeps.append(self._sweep([position for _, position in runs[:n]], units[0] == 0, end))
            runs = runs[n:]
        return sweeps

    def _sweep(self, starts: list[int], ascending: bool, end: int) -> Sweep:
        peel, n = self.peel, len(starts)
        length = starts[peel + 1] - starts[peel]
        sweep = Sweep(starts, ascending, length)
        for which in range(peel, n - peel):
            if starts[which + 1] - starts[which] != length:
                raise FoldError(
                    "the layers are not equal: one has more operators than another", where=self.ops[starts[which]].path
                )
            sweep.matched.add(sweep.unit(which))
        pattern = [self._shape(self.ops[starts[peel] + k]) for k in range(length)]
        for which in (*range(peel - 1, -1, -1), *range(n - peel, n)):
            stop = starts[which + 1] if which + 1 < n else end
            ops = self.ops[starts[which] : starts[which] + length]
            fits = starts[which] + length <= stop and (which + 1 == n or starts[which] + length == stop)
            if fits and [self._shape(op) for op in ops] == pattern:
                sweep.matched.add(sweep.unit(which))
        return sweep

    def _shape(self, op: Op) -> tuple[object, ...]:
        """What an operator is, but for names."""
        results = tuple(replace(r, name="", storage="") for r in op.results)
        fresh = tuple(self._declared[r.storage].nbytes for r in op.results)
        return (
            op.opcode,
            self.layout.with_layer(op.path, "*"),
            op.source,
            op.stream,
            op.scratch,
            len(op.operands),
            results,
            fresh,
        )

    # -- families

    def _assign(self, program: Program) -> None:
        storages: dict[Hashable, dict[int, str]] = defaultdict(dict)
        values: dict[Hashable, dict[int, str]] = defaultdict(dict)
        for storage in program.storages:
            if storage.live_in:
                self._by_name(storage.name, storages)
        for value in program.values:
            self._by_name(value.name, values)
        for number, sweep in enumerate(self.sweeps):
            for position in range(sweep.starts[0], sweep.starts[-1] + sweep.length):
                if position < len(self.ops) and (unit := sweep.unit_at(position)) is not None:
                    which = sweep.unit(unit)  # the order is its own inverse
                    self._made_in(position, (number, position - sweep.starts[which]), unit, storages, values)
        self._close(storages, values)
        within = [False] * len(self.ops)
        for sweep in self.sweeps:
            for position in range(sweep.starts[0], min(sweep.starts[-1] + sweep.length, len(self.ops))):
                within[position] = sweep.unit_at(position) is not None
        for position, op in enumerate(self.ops):
            if not within[position] and len(op.results) > 1:
                storages.clear()
                values.clear()
                self._lists(position, op, storages, values)
                self._close(storages, values)

    def _by_name(self, name: str, found: dict[Hashable, dict[int, str]]) -> None:
        place = self.layout.place(name)
        if place is not None:
            found["name", self.layout.with_layer(name, self._star(place[1]))][place[0]] = name

    def _star(self, within: int) -> str:
        return star(self.layout.period, self.layout.lead + within)

    def _made_in(
        self,
        position: int,
        key: tuple[int, int],
        unit: int,
        storages: dict[Hashable, dict[int, str]],
        values: dict[Hashable, dict[int, str]],
    ) -> None:
        for place, value in enumerate(self.ops[position].results):
            values[*key, place][unit] = value.name
            if self._born.get(value.storage) == position:
                storages[*key, place].setdefault(unit, value.storage)

    def _lists(
        self, position: int, op: Op, storages: dict[Hashable, dict[int, str]], values: dict[Hashable, dict[int, str]]
    ) -> None:
        """The results of an operator over lists (foreach) belong to the units that its operands belong to, one by one."""
        if len(op.operands) % len(op.results):
            return
        seen: dict[Member, int] = defaultdict(int)
        for result, operand in zip(op.results, op.operands, strict=False):
            owner = self.value(operand)
            if not isinstance(owner, Member):
                owner = self.storage(self._made[operand].storage)
            if isinstance(owner, Member):
                key = ("list", position, owner.family, seen[owner])
                seen[owner] += 1
                values[key][owner.unit] = result.name
                if self._born.get(result.storage) == position:
                    storages[key][owner.unit] = result.storage

    def _close(self, storages: dict[Hashable, dict[int, str]], values: dict[Hashable, dict[int, str]]) -> None:
        """Keeps the families that every repeated unit has a like member of."""
        for key, members in storages.items():
            self._keep(key, members, [self._alike(self._declared[name]) for name in members.values()], self._storages)
        for key, members in values.items():
            typed = [replace(self._made[name], name="", storage="") for name in members.values()]
            self._keep(("value", key), members, typed, self._values)

    def _alike(self, storage: Storage) -> object:
        of = None if storage.of is None else self.layout.with_layer(storage.of, "*")
        return replace(storage, name="", of=of)

    def _keep(self, family: Hashable, members: dict[int, str], looks: Sequence[object], into: dict[str, Member]) -> None:
        by_unit = dict(zip(members, looks, strict=True))
        if any(unit not in by_unit for unit in self.inner):
            return
        look = by_unit[self.inner[0]]
        if any(by_unit[unit] != look for unit in self.inner):
            return
        low, high = self.inner[0], self.inner[-1]
        while by_unit.get(low - 1) == look:
            low -= 1
        while by_unit.get(high + 1) == look:
            high += 1
        for unit in range(low, high + 1):
            into[members[unit]] = Member(family, unit)
        self._spans[family] = (low, high)
        name = members[self.inner[0]]
        place = self.layout.place(name)
        base = name if place is None else self.layout.with_layer(name, self._star(place[1]))
        self._bases[family] = base
