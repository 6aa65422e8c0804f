"""A flat program whose layers repeat, as one with Repeats over the depth L.

The program is that of a few layers, `lead` + `period` * n + `tail` (`memir.frontend.layout`). In every phase the operators of
the n units follow each other; the first and the last `peel` units stay as they are, and those between become the body of a
Repeat whose count is the depth. What the units make and hold becomes families with one member a unit: a name is its family and
the distance between the unit that uses it and the unit it belongs to. The bodies must be equal: the same operators, sizes,
strides, saves, drops and frees at the same distances, or FoldError says what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memir.frontend.families import Families, FoldError, Member, Ref, Sweep
from memir.frontend.layout import Layout
from memir.ir.core import Op, Phase, Program, Repeat, Storage, Value
from memir.ir.names import index_text, join
from memir.ir.size import Size

DEPTH = "L"
INDEX = "i"

__all__ = ["DEPTH", "FoldError", "fold"]


def fold(program: Program, layout: Layout, peel: int = 1) -> Program:
    """The program with the depth as a symbol. FoldError where the units between the peeled ones are not equal."""
    if layout.units < 2 * peel + 2:
        raise FoldError(f"{layout.units} repeating units are too few to compare")
    return _Folder(program, layout, peel).run()


class _Folder:
    def __init__(self, program: Program, layout: Layout, peel: int) -> None:
        self.program, self.layout, self.peel = program, layout, peel
        self.families = Families(program, layout, peel)
        self.num_units = layout.num_units(DEPTH)
        self._indices: dict[tuple[bool, int], str] = {}
        self._layers: dict[tuple[bool, int], str] = {}

    def run(self) -> Program:
        phases, position = [], 0
        for phase in self.program.phases:
            ops = [op for op in phase.ops if isinstance(op, Op)]
            sweeps = [s for s in self.families.sweeps if position <= s.starts[0] < position + len(ops)]
            phases.append(Phase(phase.name, tuple(self._phase(position, position + len(ops), sweeps))))
            position += len(ops)
        return replace(
            self.program,
            dims=(*self.program.dims, DEPTH),
            domain=(*self.program.domain, *self.layout.domain(DEPTH, 2 * self.peel + 1)),
            storages=tuple(self._storages()),
            values=tuple(self._values()),
            phases=tuple(phases),
        )

    def _phase(self, start: int, end: int, sweeps: Sequence[Sweep]) -> list[Op | Repeat]:
        result: list[Op | Repeat] = []
        at = start
        for sweep in sweeps:
            first, stop = sweep.starts[self.peel], sweep.starts[-self.peel]
            result += [self._outside(i) for i in range(at, first)]
            body = tuple(self._inside(sweep, sweep.starts[self.peel] + k) for k in range(sweep.length))
            for which in range(self.peel + 1, len(sweep.starts) - self.peel):
                self._compare(sweep, which)
            result.append(Repeat(INDEX, self.num_units - 2 * self.peel, body))
            at = stop
        return result + [self._outside(i) for i in range(at, end)]

    # -- names

    def _unit_index(self, member: Member) -> Size:
        """The index of a member that an operator outside of the Repeats names: counted from the nearer end."""
        low, _ = self.families.span(member.family)
        n = self.layout.units
        return Size.of(member.unit - low) if member.unit < n // 2 else self.num_units - (n - member.unit) - low

    def _index(self, member: Member, sweep: Sweep | None, unit: int) -> str:
        if sweep is None:
            return index_text(self._unit_index(member))
        low, _ = self.families.span(member.family)
        return self._reached(sweep.ascending, member.unit - unit - low)

    def _unit_of(self, ascending: bool) -> Size:
        """The unit of an iteration."""
        return Size.of(INDEX) + self.peel if ascending else self.num_units - 1 - self.peel - Size.of(INDEX)

    def _reached(self, ascending: bool, distance: int) -> str:
        """The index of a member `distance` units further on than the iteration's own."""
        key = ascending, distance
        if key not in self._indices:
            self._indices[key] = index_text(self._unit_of(ascending) + distance)
        return self._indices[key]

    def _name(self, ref: Ref, sweep: Sweep | None, unit: int) -> str:
        if not isinstance(ref, Member):
            return ref
        return join(self.families.base(ref.family), (self._index(ref, sweep, unit),))

    def _list(self, refs: Sequence[Ref]) -> tuple[str, ...]:
        """Names in a list of an operator outside of the Repeats, members of all units taken together as ranges."""
        return tuple(self._together(group) for group in self._grouped(refs))

    def _together(self, group: Sequence[Ref]) -> str:
        first = group[0]
        if len(group) == 1 or not isinstance(first, Member):
            return self._name(first, None, 0)
        return join(self.families.base(first.family), (self._range(group),))

    def _range(self, group: Sequence[Ref]) -> str:
        members = [ref for ref in group if isinstance(ref, Member)]
        low = min(members, key=lambda m: m.unit)
        high = max(members, key=lambda m: m.unit)
        start, end = self._unit_index(low), self._unit_index(high) + 1
        return f"{index_text(start) if start.terms else ''}:{index_text(end)}"

    def _grouped(self, refs: Sequence[Ref]) -> list[list[Ref]]:
        """Each reference alone, or with those of the other units: the k-th times of a family's members belong together."""
        groups: list[list[Ref]] = []
        open_groups: dict[tuple[object, int], list[Ref]] = {}
        seen: dict[Member, int] = {}
        for ref in refs:
            if not isinstance(ref, Member):
                groups.append([ref])
                continue
            seen[ref] = seen.get(ref, 0) + 1
            key = (ref.family, seen[ref])
            if key not in open_groups:
                open_groups[key] = []
                groups.append(open_groups[key])
            open_groups[key].append(ref)
        inner = set(self.families.inner)
        result: list[list[Ref]] = []
        for group in groups:
            units = {ref.unit for ref in group if isinstance(ref, Member)}
            if len(group) == 1 or (units >= inner and max(units) - min(units) + 1 == len(units)):
                result.append(group)
            elif not units & inner:
                result += [[ref] for ref in group]
            else:
                raise FoldError("an operator outside of the layers uses some of the repeated layers' tensors, not all")
        return result

    # -- operators

    def _inside(self, sweep: Sweep, position: int) -> Op:
        op, unit = self.families.ops[position], sweep.unit_at(position)
        assert unit is not None

        def storages(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(self._name(self.families.storage(n), sweep, unit) for n in names)

        return replace(
            op,
            operands=tuple(self._name(self.families.value(n), sweep, unit) for n in op.operands),
            results=tuple(
                replace(
                    r,
                    name=self._name(self.families.value(r.name), sweep, unit),
                    storage=self._name(self.families.storage(r.storage), sweep, unit),
                )
                for r in op.results
            ),
            frees=storages(op.frees),
            drops=storages(op.drops),
            saves=storages(op.saves),
            path=self._path(op.path, sweep),
            forward_of=None if op.forward_of is None else self._name(self.families.value(op.forward_of), sweep, unit),
        )

    def _path(self, path: str, sweep: Sweep | None) -> str:
        place = self.layout.place(path)
        if sweep is None:
            layer = self.layout.layer(path)
            if layer is None or layer < self.layout.lead + self.layout.period * (self.layout.units // 2):
                return path
            return self.layout.with_layer(path, "{" + index_text(Size.of(DEPTH) - (self.layout.depth - layer)) + "}")
        if place is None:
            return path
        key = sweep.ascending, place[1]
        if key not in self._layers:
            number = self._unit_of(sweep.ascending) * self.layout.period + self.layout.lead + place[1]
            self._layers[key] = "{" + index_text(number) + "}"
        return self.layout.with_layer(path, self._layers[key])

    def _compare(self, sweep: Sweep, which: int) -> None:
        """FoldError if the stretch of this unit is not the first one's."""
        first = sweep.starts[self.peel]
        for k in range(sweep.length):
            a, b = self.families.ops[first + k], self.families.ops[sweep.starts[which] + k]
            if self._inside(sweep, first + k) != self._inside(sweep, sweep.starts[which] + k):
                where = " ".join(filter(None, (b.opcode, b.path and f"@{b.path}", b.source)))
                what = "another operator stands there" if a.opcode != b.opcode else "sizes, or the layers it reaches, differ"
                raise FoldError(f"the layers are not equal: {what}", where=where)

    def _outside(self, position: int) -> Op:
        op = self.families.ops[position]

        def storages(names: Iterable[str]) -> tuple[str, ...]:
            return self._list([self.families.storage(n) for n in names])

        return replace(
            op,
            operands=self._list([self.families.value(n) for n in op.operands]),
            results=self._results(op),
            frees=storages(op.frees),
            drops=storages(op.drops),
            saves=storages(op.saves),
            path=self._path(op.path, None),
            forward_of=None if op.forward_of is None else self._name(self.families.value(op.forward_of), None, 0),
        )

    def _results(self, op: Op) -> tuple[Value, ...]:
        by_ref: dict[Ref, Value] = {self.families.value(r.name): r for r in op.results}
        results = []
        for group in self._grouped([self.families.value(r.name) for r in op.results]):
            first = by_ref[group[0]]
            storages = self._list([self.families.storage(by_ref[ref].storage) for ref in group])
            if len(storages) != 1 or len({replace(by_ref[ref], name="", storage="") for ref in group}) != 1:
                raise FoldError("the results for the layers are not equal", where=f"{op.opcode} {op.source}".strip())
            results.append(replace(first, name=self._list(group)[0], storage=storages[0]))
        return tuple(results)

    # -- declarations

    def _storages(self) -> Iterable[Storage]:
        done: set[object] = set()
        for storage in self.program.storages:
            ref = self.families.storage(storage.name)
            of = None if storage.of is None else self.families.storage(storage.of)
            if not isinstance(ref, Member):
                yield replace(storage, name=ref, of=None if of is None else self._name(of, None, 0))
            elif ref.family not in done:
                done.add(ref.family)
                of_name = None
                if isinstance(of, Member):
                    of_name = join(self.families.base(of.family), (self._owners(of, ref),))
                elif of is not None:
                    of_name = of
                name = join(self.families.base(ref.family), (self._extent(ref.family),))
                yield replace(storage, name=name, of=of_name)

    def _owners(self, of: Member, ref: Member) -> str:
        """The members of a parameter's family that the members of another one belong to: all, or a range of them."""
        (low, high), (first, last) = self.families.span(ref.family), self.families.span(of.family)
        if (low, high) == (first, last):
            return self._extent(of.family)
        if low < first or high > last:
            raise FoldError("a storage belongs to a parameter that other layers have", where=self.families.base(ref.family))
        return self._range([replace(of, unit=low), replace(of, unit=high)])

    def _values(self) -> Iterable[Value]:
        done: set[object] = set()
        for value in self.program.values:
            ref, storage = self.families.value(value.name), self.families.storage(value.storage)
            if not isinstance(ref, Member):
                yield replace(value, name=ref, storage=self._name(storage, None, 0))
            elif ref.family not in done:
                done.add(ref.family)
                if not isinstance(storage, Member) or self.families.span(storage.family) != self.families.span(ref.family):
                    raise FoldError("a layer's tensor lies in a storage that other layers have", where=value.name)
                extent = self._extent(ref.family)
                yield replace(
                    value,
                    name=join(self.families.base(ref.family), (extent,)),
                    storage=join(self.families.base(storage.family), (extent,)),
                )

    def _extent(self, family: object) -> str:
        low, high = self.families.span(family)
        return index_text(self.num_units - low - (self.layout.units - 1 - high))
