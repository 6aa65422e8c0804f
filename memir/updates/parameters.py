"""The trained parameters of a program, in the groups in which its own optimizer updates them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Repeat, Storage, Value
from memir.ir.names import index_text, join, split
from memir.ir.size import ONE, ZERO, Size
from memir.updates.layers import INDEX, Turn
from memir.updates.tape import Family, Member, existing

_OPTIMIZERS = ("torch/optim/", "transformers/optimization", "megatron/core/optimizer")
# Files whose optimizers go through a group in its order; others sort parameters by what they are.
_IN_ORDER = ("torch/optim/adam.py", "torch/optim/sgd.py", "torch/optim/adagrad.py", "torch/optim/rmsprop.py")

Items = Sequence[Op | Repeat]


def flat_ops(items: Iterable[Op | Repeat]) -> Iterator[Op]:
    """Operators in textual order, those of Repeats once."""
    for item in items:
        if isinstance(item, Repeat):
            yield from flat_ops(item.body)
        else:
            yield item


def parts_of(program: Program, items: Items) -> tuple[list[Op | Repeat], list[Op | Repeat], list[Op | Repeat]]:
    """An optimizer phase: clipping, the step, and the events after it (`zero_grad`, outputs that are dropped).

    The step begins with the first operator of an optimizer's file, or that reads a parameter or a state: clipping reads none.
    """
    owned = {s.name for s in program.storages if s.kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE)}
    values = {split(v.name)[0] for v in program.values if v.storage in owned}

    def steps(item: Op | Repeat) -> bool:
        ops = list(flat_ops([item]))
        return any(op.source.startswith(_OPTIMIZERS) or any(split(o)[0] in values for o in op.operands) for op in ops)

    last = len(items)
    while last and isinstance(item := items[last - 1], Op) and item.opcode == "memir.free" and "/" not in item.source:
        last -= 1
    first = next((k for k in range(last) if steps(items[k])), last)
    return list(items[:first]), list(items[first:last]), list(items[last:])


@dataclass(frozen=True, slots=True)
class _Part:
    """The gradient of some of a parameter's layers: the storage, the first layer's number, how many; None for one storage."""

    gradient: Storage
    start: Size
    count: Size | None

    @property
    def end(self) -> Size:
        return self.start + (ONE if self.count is None else self.count)


class Trained:
    """Reads the trained parameters off a program. `turns`: of names of repeated layers' parameters and gradients."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.turns: dict[str, Turn] = {}
        self.parameters = {split(s.name)[0]: s for s in program.storages if s.kind == Kind.PARAMETER}
        self.values = {v.storage: v for v in reversed(program.values)}
        self.made: dict[str, Value] = {}  # base of a storage -> the value that was last made in it
        self._embeddings: set[str] = set()
        self._head = ""
        self._read()

    def _read(self) -> None:
        lying = {v.name: v.storage for v in self.program.values}
        for phase in self.program.phases:
            forward = phase.name.endswith("forward")
            for op in flat_ops(phase.ops):
                if phase.name.endswith("optimizer"):
                    continue
                read = [base for o in op.operands if (base := split(lying.get(o, ""))[0]) in self.parameters]
                for result in op.results:
                    lying[result.name] = result.storage
                    self.made[split(result.storage)[0]] = result
                if forward and op.opcode.startswith("aten.embedding") and read:
                    self._embeddings.add(read[0])
                matrices = [base for base in read if len(self._value(self.parameters[base]).shape) > 1]
                self._head = matrices[-1] if forward and matrices else self._head

    def members(self, step: Items) -> list[list[Member]]:
        """The groups. UsageError without gradients; InconclusiveError where a gradient's layers cannot be told."""
        parts: dict[str, list[_Part]] = {base: [] for base in self.parameters}
        for storage in self.program.storages:
            if storage.kind == Kind.GRADIENT and storage.of is not None and not (storage.live_in and not storage.live_out):
                base, part = self._part(storage)
                parts[base].append(part)
        parts = {base: _in_order(found) for base, found in parts.items()}
        trained = [base for base, found in parts.items() if found]
        if not trained:
            hint = "trace a training step, not --mode forward"
            raise UsageError("the program has no gradients: there is nothing to update", hint=hint)
        ranks = self._ranks(step)
        known = all(base in ranks for base in trained)
        groups: dict[int, list[str]] = {}
        for base in trained:
            groups.setdefault(ranks[base] if known else 0, []).append(base)
        return [list(self._walk(groups[rank], parts, 1000 * rank)) for rank in sorted(groups)]

    def _part(self, gradient: Storage) -> tuple[str, _Part]:
        assert gradient.of is not None
        base, indices = split(gradient.of)
        parameter = self.parameters.get(base)
        count = _extent(gradient)
        if parameter is not None and (parameter.name == gradient.of or not indices):
            return base, _Part(gradient, ZERO, count)
        if parameter is None or len(indices) != 1 or indices[0].size is None:
            raise InconclusiveError("memir cannot tell whose gradient this is", where=f"${gradient.name} of {gradient.of}")
        return base, _Part(gradient, indices[0].start if indices[0].ranged else indices[0].size, count)

    def _ranks(self, step: Items) -> dict[str, int]:
        """Parameter's base -> the group it is in.

        An operator over a list has one group's parameters. A loop goes through a group as the parameters are declared, and
        through its layers before it comes to the next.
        """
        lying = {split(v.name)[0]: split(v.storage)[0] for v in self.program.values}
        for phase in self.program.phases:
            lying |= {split(r.name)[0]: split(r.storage)[0] for op in flat_ops(phase.ops) for r in op.results}
        order = {base: k for k, base in enumerate(self.parameters)}
        ranks: dict[str, int] = {}
        rank, latest, layers_done = 0, -1, False
        for item in step:
            for op in flat_ops([item]):
                bases = dict.fromkeys(lying.get(split(operand)[0], "") for operand in op.operands)
                new = [base for base in bases if base in order and base not in ranks]
                if not new or not op.source.startswith(_IN_ORDER):
                    continue
                listed = op.opcode.startswith(("aten._foreach_", "aten._fused_"))
                again = layers_done and _extent(self.parameters[new[0]]) is not None
                if ranks and (listed or again or order[new[0]] < latest):
                    rank, layers_done = rank + 1, False
                ranks |= dict.fromkeys(new, rank)
                latest = order[new[-1]]
            layers_done |= isinstance(item, Repeat)
        return ranks

    def _walk(self, bases: Sequence[str], parts: dict[str, list[_Part]], stretch: int) -> Iterator[Member]:
        """The members in the order of an update: parameters as declared, those of repeated layers layer by layer."""
        at = 0
        while at < len(bases):
            layers = _layers(parts[bases[at]])
            if layers is None:
                for part in parts[bases[at]]:
                    yield self._single(self.parameters[bases[at]], part)
                at += 1
                continue
            end = at
            while end < len(bases) and _layers(parts[bases[end]]) == layers:
                end += 1
            for unit in range(3):
                for base in bases[at:end]:
                    yield self._sampled(self.parameters[base], parts[base], layers, (stretch + at, unit))
            at = end

    def _single(self, parameter: Storage, part: _Part) -> Member:
        value, gradient = self._value(parameter), self._gradient(part.gradient)
        if _extent(parameter) is None:
            base, indices = split(parameter.name)
            return self._member(parameter, base, indices[0].text if indices else "", value, gradient)
        base = f"{split(parameter.name)[0]}.{index_text(part.start)}"  # one layer's of a family
        return self._member(parameter, base, "", _at(value, part.start), gradient)

    def _sampled(self, parameter: Storage, parts: Sequence[_Part], layers: tuple[Size, Size], place: tuple[int, int]) -> Member:
        start, count = layers
        unit = place[1]
        index = (ZERO, Size.of(INDEX) + 1, count - 1)[unit]
        base = split(parameter.name)[0]
        value = _at(self._value(parameter), start + index)
        end = start + count
        text = f"{index_text(start) if start.terms else ''}:{index_text(end)}"
        for name in (value.name, value.storage):
            self.turns[name] = Turn(unit, start, text if unit == 0 else None)
        member = self._member(parameter, base, index_text(index), value, self._gradient_of(parts, unit, start, index))
        whole = start is ZERO and end is _extent(parameter)
        extent = split(parameter.name)[1][0].text if whole else f":{count}" if count.is_constant else index_text(count)
        member.place = place
        member.family = Family(count, extent, parameter.name if whole else join(base, (text,)))
        return member

    def _gradient_of(self, parts: Sequence[_Part], unit: int, start: Size, index: Size) -> Value:
        """The gradient of the first, the second or the last layer; one of them may lie apart from the others."""
        part = parts[-1] if unit == 2 else parts[0] if unit == 0 else next(p for p in parts if p.count is not None)
        gradient = self._gradient(part.gradient)
        if part.count is None:
            return gradient
        offset = start - part.start
        made = _at(gradient, index + offset)
        first = 0 if parts[0] is part else 1  # the unit whose name stands for the range
        text = f":{index_text(part.count)}" if unit == first else None
        self.turns[made.name] = self.turns[made.storage] = Turn(unit, offset, text)
        return made

    def _member(self, parameter: Storage, base: str, index: str, value: Value, gradient: Value) -> Member:
        member = Member(base, index, value.storage, existing(value), existing(gradient))
        member.is_embedding = split(parameter.name)[0] in self._embeddings
        member.is_head = split(parameter.name)[0] == self._head
        return member

    def _value(self, storage: Storage) -> Value:
        value = self.values.get(storage.name)
        if value is None:
            raise InconclusiveError("no operator reads this parameter: its shape is not known", where=f"${storage.name}")
        return value

    def _gradient(self, storage: Storage) -> Value:
        value = self.made.get(split(storage.name)[0])
        alike = value is not None and [i.text for i in split(value.name)[1]] == [i.text for i in split(value.storage)[1]]
        if value is None or not alike or (_extent(storage) is None and value.storage != storage.name):
            raise InconclusiveError("memir cannot tell which tensor this gradient is", where=f"${storage.name}")
        return value


def _extent(storage: Storage) -> Size | None:
    """How many members a declaration has; None for one storage."""
    indices = split(storage.name)[1]
    return indices[0].size if len(indices) == 1 and indices[0].is_extent else None


def _in_order(parts: Sequence[_Part]) -> list[_Part]:
    """Each behind the one that ends where it begins."""
    ordered = [part for part in parts if all(other.end != part.start for other in parts)]
    while more := [part for part in parts if part not in ordered and any(p.end == part.start for p in ordered)]:
        ordered += more
    return ordered if len(ordered) == len(parts) else list(parts)


def _layers(parts: Sequence[_Part]) -> tuple[Size, Size] | None:
    """The first layer and how many there are, where they lie one after the other; None where each gradient is by itself."""
    families = [part for part in parts if part.count is not None]
    if not families:
        return None
    joined = all(a.end == b.start for a, b in pairwise(parts))
    if len(families) > 1 or not joined:
        raise InconclusiveError("memir cannot tell the layers of these gradients", where=f"${parts[0].gradient.name}")
    return parts[0].start, parts[-1].end - parts[0].start


def _at(value: Value, index: Size) -> Value:
    """The member of a family of values."""
    text = index_text(index)
    return replace(value, name=join(split(value.name)[0], (text,)), storage=join(split(value.storage)[0], (text,)))
