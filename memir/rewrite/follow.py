"""Whether a lifted program comes out as one more sample did, which the lines through the others did not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from memir.ir.core import Program
from memir.ir.size import Size
from memir.ir.unroll import unroll_located
from memir.rewrite.samples import Block, Element, Sample

Env = Mapping[str, int]
Number = Callable[[tuple[int, ...]], Size]  # numbers in the samples -> the line through them
Sizes = Callable[[Sequence[Size]], Size]


def follows(new: Program, samples: Sequence[Sample], env: Env, number: Number, size: Sizes) -> bool:
    """Whether the program at `env` is the last one of the samples: `new` is lifted from those before it."""
    if _Lines(samples, env, number, size).agree():
        return True
    mine = unroll_located(new, {d: v for d, v in env.items() if d in new.dims}).program
    return _events(mine) == _events(samples[-1].program)


class _Lines:
    """Compares operator by operator and family by family, bodies once: what agrees so needs not be written out."""

    def __init__(self, samples: Sequence[Sample], env: Env, number: Number, size: Sizes) -> None:
        self.samples, self.env = samples, env
        self.number, self.size = number, size
        self._numbers: dict[tuple[int, ...], bool] = {}
        self._sizes: dict[tuple[Size, ...], bool] = {}

    def agree(self) -> bool:
        """Whether all lines go through the last sample; False does not mean that it does not come out."""
        if len({len(s.phases) for s in self.samples}) != 1:
            return False
        for group in zip(*(s.phases for s in self.samples), strict=True):
            if len({name for name, _ in group}) != 1 or len({len(items) for _, items in group}) != 1:
                return False
            if not all(self._items(items) for items in zip(*(items for _, items in group), strict=True)):
                return False
        return self._storages() and self._values()

    def _items(self, items: Sequence[Element | Block]) -> bool:
        blocks = [item for item in items if isinstance(item, Block)]
        elements = [item for item in items if isinstance(item, Element)]
        if len(elements) == len(items):
            return self._element(elements)
        if len(blocks) != len(items) or len({len(b.body) for b in blocks}) != 1 or not self._line([b.count for b in blocks]):
            return False
        if any(b.steps != blocks[-1].steps for b in blocks if b.count > 1):
            return False
        return all(self._element(group) for group in zip(*(b.body for b in blocks), strict=True))

    def _element(self, group: Sequence[Element]) -> bool:
        first, last = group[0], group[-1]
        if first.template is not last.template and first.template != last.template:
            return False
        numbers = zip(*(e.numbers for e in group), strict=True)
        return all(map(self._line, numbers)) and all(map(self._bytes, zip(*(e.sizes for e in group), strict=True)))

    def _line(self, values: Sequence[int]) -> bool:
        key = tuple(values)
        if key not in self._numbers:
            self._numbers[key] = self.number(key[:-1]).evaluate(self.env) == key[-1]
        return self._numbers[key]

    def _bytes(self, values: Sequence[Size]) -> bool:
        key = tuple(values)
        if key not in self._sizes:
            self._sizes[key] = self.size(key[:-1]).substitute(self.env) is key[-1]
        return self._sizes[key]

    def _storages(self) -> bool:
        if len({len(s.storages) for s in self.samples}) != 1:
            return False
        for group in zip(*(s.storages for s in self.samples), strict=True):
            kinds = {(f.base, f.of, f.of_ranged, f.storage.kind, f.storage.live_in, f.storage.live_out) for f in group}
            numbers = ([f.length for f in group], [f.of_start for f in group], [f.of_total for f in group])
            named = len(kinds) == 1 and len(group[0].lengths) == len(group[-1].lengths)
            if not (named and all(map(self._line, numbers)) and self._bytes([f.storage.nbytes for f in group])):
                return False
        return True

    def _values(self) -> bool:
        if len({len(s.values) for s in self.samples}) != 1:
            return False
        for group in zip(*(s.values for s in self.samples), strict=True):
            named = len({(f.base, f.ranged, f.storage_base, f.storage_ranged, f.value.dtype) for f in group}) == 1
            if not (named and self._line([f.length for f in group]) and self._line([f.storage_start for f in group])):
                return False
        return True


def _events(program: Program) -> list[tuple[object, ...]]:
    """What happens to memory, operator by operator. Sizes are interned: equal ones are one object."""
    nbytes = {s.name: s.nbytes for s in program.storages}
    live = {s.name for s in program.storages if s.live_in}
    events: list[tuple[object, ...]] = [(sorted(id(nbytes[n]) for n in live),)]
    for phase, op in program.ops():
        made = []
        for value in op.results:
            if value.storage not in live:
                live.add(value.storage)
                made.append(nbytes[value.storage])
        live -= set(op.frees)
        events.append((phase.name, op.opcode, op.scratch, tuple(made), sorted(id(nbytes[n]) for n in op.frees)))
    return events
