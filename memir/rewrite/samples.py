"""One rewritten flat program, read for lifting: operators as templates and numbers, iterations as stretches, families."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from memir.errors import InconclusiveError
from memir.ir.core import Op, Program, Repeat, Storage, Value
from memir.ir.names import join
from memir.ir.size import Size
from memir.ir.unroll import Unrolled

_INDEXED = re.compile(r"(.*)\[(-?\d+)\]$")
_LISTS = (
    "aten._foreach_",
    "aten._fused_",
    "aten.stack",
    "aten.cat",
    "_c10d_functional.all_reduce_coalesced",
)  # operators over a list of any length
Ref = tuple[str, tuple[int, ...], bool]  # base, indices (one, or a range's start and end), whether it is a range


@dataclass(slots=True)
class Element:
    """An operator: `template` says all but numbers and sizes; `numbers` are its indices in order, `sizes` its sizes."""

    given: Op  # as it stands in the program
    op: Op
    refs: tuple[tuple[Ref, ...], ...]  # operands, result values, result storages, frees, drops, saves, forward_of
    path: tuple[str, ...]  # of the module, numbers taken out
    numbers: tuple[int, ...]
    sizes: tuple[Size, ...]
    template: tuple[object, ...]

    def build(self, texts: Sequence[str], sizes: Sequence[Size]) -> Op:
        """The operator with these texts for its numbers, and these sizes."""
        left, rest = list(texts), list(sizes)

        def names(refs: Sequence[Ref]) -> tuple[str, ...]:
            made = []
            for base, indices, ranged in refs:
                if not indices:
                    made.append(base)
                elif ranged:
                    start, end = left.pop(0), left.pop(0)
                    made.append(join(base, (f"{'' if start == '0' else start}:{end}",)))
                else:
                    made.append(join(base, (left.pop(0),)))
            return tuple(made)

        operands, values, storages, frees, drops, saves, forward = map(names, self.refs)
        results = []
        for value, name, storage in zip(self.op.results, values, storages, strict=False):
            shape = tuple(rest.pop(0) for _ in value.shape)
            strides = tuple(rest.pop(0) for _ in value.strides)
            results.append(Value(name, value.dtype, shape, strides, rest.pop(0), storage))
        scratch = rest.pop(0)
        path = "".join(part if part else "{" + left.pop(0) + "}" for part in self.path)
        path = re.sub(r"\{(-?\d+)\}", r"\1", path)
        return replace(
            self.op,
            operands=operands,
            results=tuple(results),
            frees=frees,
            drops=drops,
            saves=saves,
            scratch=scratch,
            path=path,
            forward_of=forward[0] if forward else None,
        )


@dataclass(slots=True)
class Block:
    """Iterations one after the other that differ only in numbers: the first one's operators, and what each next one adds."""

    body: list[Element]
    steps: list[tuple[int, ...]]
    count: int


@dataclass(slots=True)
class Family:
    """Storages that are alike and numbered one after the other, or one storage."""

    base: str
    storage: Storage
    length: int
    lengths: tuple[int, ...]  # (1,) for one without an index
    of: str | None = None
    of_start: int = 0
    of_total: int = 0
    of_ranged: bool = False


@dataclass(slots=True)
class ValueFamily:
    """Values before the first operator that are alike, or one value."""

    base: str
    value: Value
    length: int
    ranged: bool
    storage_base: str
    storage_start: int
    storage_ranged: bool


@dataclass(slots=True)
class Sample:
    """A rewritten program at one place."""

    program: Program
    phases: list[tuple[str, list[Element | Block]]]
    storages: list[Family]
    values: list[ValueFamily]


class Reading:
    """Operators read, each once: rewritten programs share those that the rewrite leaves as they are."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Element, frozenset[str], frozenset[str]]] = {}  # by the operator's identity

    def element(self, op: Op, rebased: Renamed, revalued: Renamed) -> Element:
        """The operator, names of storages and values replaced."""
        found = self._known.get(id(op))
        if found is not None:
            element, storages, values = found
            if element.given is op and rebased.changed.isdisjoint(storages) and revalued.changed.isdisjoint(values):
                return element
        element = _element(op, rebased.names, revalued.names)
        storages = frozenset((*op.frees, *op.drops, *op.saves, *[r.storage for r in op.results]))
        values = frozenset((*op.operands, *[r.name for r in op.results], op.forward_of or ""))
        if rebased.changed.isdisjoint(storages) and revalued.changed.isdisjoint(values):
            self._known[id(op)] = element, storages, values
        return element


class Renamed:
    """New names, and which of them differ from the old ones."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self.changed = {old for old, new in names.items() if new != old}


def sampled(
    folded: Program, base: Unrolled, new: Program, origins: Sequence[int], *, stride: int = 1, reading: Reading | None = None
) -> Sample:
    """Reads the rewritten program; `origins` has for each operator the position in the flat program where it runs, `stride` is
    the number of layers in an iteration."""
    reading = reading or Reading()
    rebased, storages = _families(new)
    revalued, values = _value_families(new, rebased)
    revalued |= _from_zero(new)
    storage_names, value_names = Renamed(rebased), Renamed(revalued)
    iterations = _iterations(folded, base)
    phases: list[tuple[str, list[Element | Block]]] = []
    position = 0
    for phase in new.phases:
        parts: list[tuple[tuple[int, int] | None, list[Element]]] = []
        for op in phase.ops:
            assert isinstance(op, Op)
            where = iterations[origins[position]]
            position += 1
            element = reading.element(op, storage_names, value_names)
            if where is not None and parts and parts[-1][0] == where:
                parts[-1][1].append(element)
            else:
                parts.append((where, [element]))
        phases.append((phase.name, _stretches(parts, stride)))
    return Sample(new, phases, storages, values)


def _iterations(folded: Program, base: Unrolled) -> list[tuple[int, int] | None]:
    """For each flat operator the place of its Repeat and the iteration; None outside of all."""
    repeat_of: dict[int, int] = {}
    place = 0
    for phase in folded.phases:
        for item in phase.ops:
            if isinstance(item, Repeat):
                if any(isinstance(inner, Repeat) for inner in item.body):
                    raise InconclusiveError("a Repeat within a Repeat cannot be rewritten yet")
                repeat_of.update({place + 1 + k: place for k in range(len(item.body))})
                place += len(item.body)
            place += 1
    seen: dict[int, int] = defaultdict(int)
    result: list[tuple[int, int] | None] = []
    for origin in base.ops:
        repeat = repeat_of.get(origin)
        result.append(None if repeat is None else (repeat, seen[origin]))
        seen[origin] += 1
    return result


# -- operators


@lru_cache(maxsize=65536)
def _split(name: str) -> tuple[str, int | None]:
    found = _INDEXED.match(name)
    return (found.group(1), int(found.group(2))) if found else (name, None)


@lru_cache(maxsize=65536)
def _ref(name: str) -> Ref:
    base, index = _split(name)
    return base, () if index is None else (index,), False


def _grouped(names: Sequence[str]) -> tuple[Ref, ...]:
    """The names of a list, those of one family taken together as a range; the k-th time of each member together."""
    groups: dict[tuple[str, int], list[int]] = {}
    order: list[tuple[str, int] | str] = []
    times: dict[str, int] = defaultdict(int)
    for name in names:
        base, index = _split(name)
        if index is None:
            order.append(name)
            continue
        times[name] += 1
        key = base, times[name]
        if key not in groups:
            groups[key] = []
            order.append(key)
        groups[key].append(index)
    refs: list[Ref] = []
    for item in order:
        if isinstance(item, str):
            refs.append((item, (), False))
            continue
        members = sorted(groups[item])
        if members != list(range(members[0], members[-1] + 1)):
            raise InconclusiveError("an operator uses some of the layers' tensors, not all in a row", where=item[0])
        refs.append((item[0], (members[0], members[-1] + 1), True))
    return tuple(refs)


def _element(op: Op, rebased: dict[str, str], revalued: dict[str, str]) -> Element:
    operands = [revalued.get(o, o) for o in op.operands]
    forward = None if op.forward_of is None else revalued.get(op.forward_of, op.forward_of)

    def storages(names: Sequence[str]) -> list[str]:
        return [rebased.get(n, n) for n in names] if names else []

    listed = op.opcode.startswith(_LISTS)
    results = op.results
    values, places = [revalued.get(r.name, r.name) for r in results], storages([r.storage for r in results])
    if listed and len(results) > 1:
        value_refs, storage_refs = _grouped(values), _grouped(places)
        if len(value_refs) != len(storage_refs):
            raise InconclusiveError("the results of a list do not lie in storages alike", where=op.opcode)
        by_base = {_split(revalued.get(r.name, r.name))[0]: r for r in reversed(results)}
        results = tuple(by_base[ref[0]] for ref in value_refs)
    else:
        value_refs, storage_refs = tuple(map(_ref, values)), tuple(map(_ref, places))
    refs = (
        _grouped(operands) if listed else tuple(map(_ref, operands)),
        value_refs,
        storage_refs,
        _sets(storages(op.frees)),
        _sets(storages(op.drops)),
        _sets(storages(op.saves)),
        () if forward is None else (_ref(forward),),
    )
    parts, path_numbers = _path(op.path)
    numbers = tuple([n for group in refs for _, indices, _ in group for n in indices]) + path_numbers
    sizes = (*[s for r in results for s in (*r.shape, *r.strides, r.offset)], op.scratch)
    template = (
        op.opcode,
        tuple([tuple([(base, ranged) for base, _, ranged in group]) for group in refs]),
        parts,
        op.source,
        op.stream,
        tuple([(r.dtype, len(r.shape)) for r in results]),
    )
    named = op if results is op.results else replace(op, results=results)
    return Element(op, named, refs, parts, numbers, sizes, template)


def _sets(names: Sequence[str]) -> tuple[Ref, ...]:
    """Names whose order says nothing: one alone stays alone, several of one family in a row are a range, sorted by name."""
    if len(names) < 2:
        return tuple([_ref(name) for name in names])
    refs = []
    for base, indices, ranged in sorted(_grouped(names)):
        if ranged and indices[1] == indices[0] + 1:
            refs.append((base, indices[:1], False))
        else:
            refs.append((base, indices, ranged))
    return tuple(refs)


@lru_cache(maxsize=65536)
def _path(path: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A module path with its numbers taken out: `layers.3.up` -> ("layers.", "", ".up"), (3,)."""
    parts: list[str] = []
    numbers: list[int] = []
    for part in re.split(r"((?<![^.])\d+(?![^.]))", path):
        if part.isdigit():
            parts.append("")
            numbers.append(int(part))
        elif part:
            parts.append(part)
    return tuple(parts), tuple(numbers)


def _stretches(parts: Sequence[tuple[tuple[int, int] | None, list[Element]]], stride: int) -> list[Element | Block]:
    """Iterations that differ in numbers by the same steps, taken together."""
    result: list[Element | Block] = []
    last: tuple[int, int] | None = None
    for where, elements in parts:
        if where is None:
            result += elements
        else:
            block = (
                result[-1] if result and isinstance(result[-1], Block) and last is not None and last[0] == where[0] else None
            )
            if not (isinstance(block, Block) and _joins(block, elements, stride)):
                result.append(Block(elements, [(0,) * len(e.numbers) for e in elements], 1))
        last = where
    return result


def _joins(block: Block, elements: Sequence[Element], stride: int) -> bool:
    """Takes one more iteration into the block if it continues it: a layer's number goes on by `stride`, an index by one."""
    if len(block.body) != len(elements):
        return False
    for first, now in zip(block.body, elements, strict=True):
        if first.template != now.template or first.sizes != now.sizes:
            return False
    if block.count == 1:
        steps = [
            tuple(n - f for f, n in zip(first.numbers, now.numbers, strict=True))
            for first, now in zip(block.body, elements, strict=True)
        ]
        for first, step in zip(block.body, steps, strict=True):
            indices = len(step) - first.path.count("")
            if any(abs(s) > 1 for s in step[:indices]) or any(abs(s) > max(1, stride) for s in step[indices:]):
                return False
        block.steps = steps
    else:
        for first, now, step in zip(block.body, elements, block.steps, strict=True):
            if any(f + s * block.count != n for f, n, s in zip(first.numbers, now.numbers, step, strict=True)):
                return False
    block.count += 1
    return True


# -- declarations


def _families(program: Program) -> tuple[dict[str, str], list[Family]]:
    """The program's storages as families that count from 0, and each member's new name."""
    members: dict[str, list[tuple[int | None, Storage]]] = defaultdict(list)
    for storage in program.storages:
        base, index = _split(storage.name)
        members[base].append((index, storage))
    rebased: dict[str, str] = {}
    segments: list[tuple[str, list[tuple[int | None, Storage]]]] = []
    for base, group in members.items():
        if group[0][0] is None:
            segments.append((base, group))
            continue
        runs: list[list[tuple[int | None, Storage]]] = []
        for index, storage in sorted(group, key=lambda item: item[0] or 0):
            previous = runs[-1][-1] if runs else None
            if previous is not None and previous[0] == (index or 0) - 1 and _alike(previous[1], storage):
                runs[-1].append((index, storage))
            else:
                runs.append([(index, storage)])
        for number, run in enumerate(reversed(runs)):
            name = base if number == 0 else f"{base}/{number}"
            segments.append((name, run))
            for k, (_, storage) in enumerate(run):
                rebased[storage.name] = f"{name}[{k}]"
    totals = {name: len(run) for name, run in segments}
    families = []
    for name, run in segments:
        index, storage = run[0]
        family = Family(name, storage, len(run), (1,) if index is None else (len(run), 0))
        if storage.of is not None:
            base, of_index = _split(rebased.get(storage.of, storage.of))
            family.of, family.of_start, family.of_ranged = base, of_index or 0, of_index is not None
            family.of_total = totals.get(base, 1)
        families.append(family)
    return rebased, families


def _alike(a: Storage, b: Storage) -> bool:
    same = (a.nbytes, a.kind, a.device, a.live_in, a.live_out) == (b.nbytes, b.kind, b.device, b.live_in, b.live_out)
    if not same or (a.of is None) != (b.of is None):
        return False
    if a.of is None or b.of is None:
        return True
    (base_a, index_a), (base_b, index_b) = _split(a.of), _split(b.of)
    return base_a == base_b and (index_a == index_b if index_a is None or index_b is None else index_b == index_a + 1)


def _from_zero(program: Program) -> dict[str, str]:
    """The values that operators make, those of one family counted from 0: each name and its new one."""
    least: dict[str, int] = {}
    names = [r.name for _, op in program.ops() for r in op.results]
    for name in names:
        base, index = _split(name)
        if index is not None:
            least[base] = min(index, least.get(base, index))
    return {
        name: f"{base}[{index - least[base]}]"
        for name in names
        for base, index in [_split(name)]
        if index is not None and least[base]
    }


def _value_families(program: Program, rebased: dict[str, str]) -> tuple[dict[str, str], list[ValueFamily]]:
    """The values before the first operator as families that count from 0, and each member's new name."""
    runs: list[list[tuple[int | None, Value]]] = []
    latest: dict[str, list[tuple[int | None, Value]]] = {}
    for value in program.values:
        base, index = _split(value.name)
        place = rebased.get(value.storage)
        placed = value if place is None else replace(value, storage=place)
        run = latest.get(base)
        if run is not None and index is not None and run[-1][0] == index - 1 and _continues(run[-1][1], placed):
            run.append((index, placed))
        else:
            latest[base] = [(index, placed)]
            runs.append(latest[base])
    times: dict[str, int] = defaultdict(int)
    revalued: dict[str, str] = {}
    families = []
    for run in reversed(runs):
        index, value = run[0]
        base = _split(value.name)[0]
        name = base if not times[base] else f"{base}/{times[base]}"
        times[base] += 1
        if index is not None:
            revalued |= {v.name: f"{name}[{k}]" for k, (_, v) in enumerate(run)}
        storage, start = _split(value.storage)
        families.append(ValueFamily(name, value, len(run), index is not None, storage, start or 0, start is not None))
    return revalued, families[::-1]


def _continues(a: Value, b: Value) -> bool:
    (base_a, index_a), (base_b, index_b) = _split(a.storage), _split(b.storage)
    if (a.dtype, a.shape, a.strides, a.offset, base_a) != (b.dtype, b.shape, b.strides, b.offset, base_b):
        return False
    return index_a is not None and index_b is not None and index_b == index_a + 1
