"""Loops over tokens: models that run a layer's recurrence step by step in Python (`for i in range(seq_len)`).

Their number of operators grows with S, so no one trace has S as a symbol. Traces at neighbouring small S show the loops:
stretches that repeat once more for each token. In each trace the iterations in the middle are collapsed into one: storages that
they leave behind become one of their total size. Live bytes only grow, or only shrink, from one iteration to the next, so the
collapsed program has the same peak; its sizes are fitted over S like those of any lost symbol, and the peak of every phase is
verified against a whole trace at another S (`memir.frontend.fit`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError
from memir.ir.core import Op, Phase, Program, Value
from memir.ir.size import ONE, ZERO, Size

KEPT = 3  # iterations that stay as they are at each end of a loop
_WINDOW = 12  # operators that must agree after an inserted iteration; the next loop's own is at least as far away
_NO_LOOP = "the operators change with S in a way that is no loop over tokens"
Signature = tuple[str, str, str, str, int]


@dataclass(frozen=True, slots=True)
class Loop:
    """Iteration i < count is the operators start + i*period to start + (i+1)*period of a flat program."""

    start: int
    period: int
    count: int

    def middle(self) -> range:
        """The operators of the iterations that are collapsed."""
        return range(self.start + KEPT * self.period, self.start + (self.count - KEPT) * self.period)

    def representative(self, index: int) -> int:
        """The operator of the first middle iteration at the place that `index` has in its own."""
        first = self.middle().start
        return first + (index - first) % self.period


def find_loops(shorter: Program, longer: Program) -> list[Loop]:
    """The loops of `longer`, which has one iteration more in each than `shorter`. Raises InconclusiveError."""
    a, b = _signatures(shorter), _signatures(longer)
    loops: list[Loop] = []
    i = j = 0
    while j < len(b):
        if i < len(a) and a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        period = next((p for p in range(1, len(b) - j + 1) if _agree(a, i, b, j + p) and _repeats(b, j, p)), None)
        if period is None:
            raise InconclusiveError(_NO_LOOP, where=b[j][3])
        start, end = j, j
        least = loops[-1].start + loops[-1].period * loops[-1].count if loops else 0
        while start > least and b[start - 1] == b[start - 1 + period]:
            start -= 1
        while end + period < len(b) and b[end] == b[end + period]:
            end += 1
        loops.append(Loop(start, period, (end + period - start) // period))
        j += period
    if i != len(a) or not loops or min(loop.count for loop in loops) < 2 * KEPT + 2:
        raise InconclusiveError(_NO_LOOP)
    return loops


def _repeats(ops: list[Signature], at: int, period: int) -> bool:
    """Whether the stretch at `at` has the operators of the one before it: an iteration more, in whatever rotation."""
    return at >= period and Counter(ops[at : at + period]) == Counter(ops[at - period : at])


def _agree(a: list[Signature], i: int, b: list[Signature], j: int) -> bool:
    return a[i : i + _WINDOW] == b[j : j + _WINDOW]


def lengthened(loops: list[Loop], more: int) -> list[Loop]:
    """The loops of a program with `more` iterations in each (negative: fewer)."""
    moved, shift = [], 0
    for loop in loops:
        moved.append(Loop(loop.start + shift, loop.period, loop.count + more))
        shift += more * loop.period
    return moved


def _signatures(program: Program) -> list[Signature]:
    return [(phase.name, op.opcode, op.path, op.source, len(op.results)) for phase, op in program.ops()]


def collapse(program: Program, loops: list[Loop]) -> Program:
    """The program with the middle iterations of each loop as one, and names that do not depend on their number."""
    return _Collapse(program, loops).run()


class _Collapse:
    def __init__(self, program: Program, loops: list[Loop]) -> None:
        self.program = program
        self.ops = [op for _, op in program.ops()]
        self.inside = {index: loop for loop in loops for index in loop.middle()}
        self.storages = {s.name: s for s in program.storages}
        self.born: dict[str, int] = {}
        live = {s.name for s in program.storages if s.live_in}
        for index, op in enumerate(self.ops):
            for value in op.results:
                if value.storage not in live and value.storage not in self.born:
                    self.born[value.storage] = index
        self.death = {name: index for index, op in enumerate(self.ops) for name in op.frees}
        self.stand_in: dict[str, str] = {}  # storage made in a middle iteration -> the one that stands for it
        self.total: dict[str, Size] = {}  # what a stand-in takes, where it stands for several
        self.extra: dict[int, list[str]] = defaultdict(list)  # operator -> storages that it makes beside its own results
        self.frees: dict[int, list[str]] = defaultdict(list)

    def at(self, index: int) -> int:
        """Where an operator is in the collapsed program: itself, or its representative."""
        loop = self.inside.get(index)
        return index if loop is None else loop.representative(index)

    def run(self) -> Program:
        """See `collapse`."""
        groups: dict[tuple[int, int], list[str]] = defaultdict(list)
        for index in self.inside:
            seen = 0
            for value in self.ops[index].results:
                if self.born.get(value.storage) == index:
                    groups[self.at(index), seen].append(value.storage)
                    seen += 1
        for (maker, _), members in groups.items():
            self._group(maker, members)
        for name, index in self.death.items():
            if name not in self.stand_in:
                self.frees[self.at(index)].append(name)
        return self._renamed()

    def _group(self, maker: int, members: list[str]) -> None:
        """Decides what one place of the loop's body leaves behind: nothing, its last storage, or all of them."""
        middle = self.inside[maker].middle()
        inner = [name for name in members if self.death.get(name) in middle]
        if len(inner) == len(members):
            first = next(name for name in members if self.born[name] == maker)
            gone = self.death[first]
            if self.at(gone) < maker or gone >= maker + self.inside[maker].period:
                raise InconclusiveError(_NO_LOOP, where=self.ops[maker].source)
            self.frees[gone].append(first)
            self.stand_in.update(dict.fromkeys(members, first))
            return
        classes: dict[int | None, list[str]] = defaultdict(list)
        for name in members:
            if name not in inner:
                gone_at = self.death.get(name)
                classes[None if gone_at is None else self.at(gone_at)].append(name)
        ordered = sorted(classes.items(), key=lambda item: (-len(item[1]), item[0] is None, item[0] or 0))
        first = next((name for name in members if self.born[name] == maker and name not in inner), ordered[0][1][0])
        own = next(names[0] for _, names in ordered if first in names)  # what the representative's own result stands for
        self.stand_in.update(dict.fromkeys(inner, own))
        for gone_at, names in ordered:
            total = ZERO
            for name in names:
                total = total + self.storages[name].nbytes
            self.total[names[0]] = total
            self.stand_in.update(dict.fromkeys(names, names[0]))
            if names[0] != own:
                self.extra[maker].append(names[0])
            if gone_at is not None:
                self.frees[gone_at].append(names[0])

    def _renamed(self) -> Program:
        kept = [index for index in range(len(self.ops)) if self.at(index) == index]
        values: dict[str, str] = {v.name: v.name for v in self.program.values}
        names: dict[str, str] = {s.name: s.name for s in self.program.storages if s.live_in}
        for number, index in enumerate(kept):
            op = self.ops[index]
            for place, value in enumerate(op.results):
                values[value.name] = f"v{number}" + (f".{place}" if place else "")
                names.setdefault(self._standing(value.storage), f"s{number}" + (f".{place}" if place else ""))
            for place, storage in enumerate(self.extra[index]):
                names[storage] = f"s{number}.more{place}"
        for index in self.inside:
            same = self.ops[self.at(index)]
            for mine, theirs in zip(self.ops[index].results, same.results, strict=True):
                values[mine.name] = values[theirs.name]
        dropped: set[str] = set()
        made = {index: self._op(index, values, names, dropped) for index in kept}
        phases, position = [], 0
        for phase in self.program.phases:
            here = range(position, position + len(phase.ops))
            phases.append(Phase(phase.name, tuple(made[i] for i in here if i in made)))
            position += len(phase.ops)
        declared = []
        for old, new in names.items():
            kind = self.storages[old]
            owner = None if kind.of is None else names[kind.of]
            declared.append(replace(kind, name=new, nbytes=self.total.get(old, kind.nbytes), of=owner))
        return replace(self.program, storages=tuple(declared), phases=tuple(phases))

    def _standing(self, storage: str) -> str:
        return self.stand_in.get(storage, storage)

    def _op(self, index: int, values: dict[str, str], names: dict[str, str], dropped: set[str]) -> Op:
        op = self.ops[index]

        def renamed(storages: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(names[self._standing(s)] for s in storages))

        results = [replace(v, name=values[v.name], storage=names[self._standing(v.storage)]) for v in op.results]
        for storage in self.extra[index]:
            size = self.total[storage]
            results.append(Value(f"{names[storage]}.bytes", "u8", (size,), (ONE,), ZERO, names[storage]))
        frees = tuple(names[s] for s in self.frees[index])
        drops = tuple(s for s in renamed(op.drops) if s not in dropped and s not in frees)
        dropped.update(drops)
        return replace(
            op,
            operands=tuple(dict.fromkeys(values[o] for o in op.operands)),
            results=tuple(results),
            frees=frees,
            drops=drops,
            saves=renamed(op.saves),
            forward_of=None if op.forward_of is None else values[op.forward_of],
        )
