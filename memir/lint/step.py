"""A step as the rules look at it: what each storage holds, what depends on parameters, what a removal would give back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from memir.analysis.liveness import LiveRange, Step
from memir.diff.orders import powers
from memir.diff.side import START, Side
from memir.ir.core import Kind, Value
from memir.ir.size import ZERO, Size

WIDE = ("f32", "f64")
NARROW = ("bf16", "f16")
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes that would not be there from operator `first` to operator `last` (None: the step's start, its end)."""

    storage: str
    nbytes: Size
    first: int | None
    last: int | None


@dataclass(frozen=True)
class LintStep:
    """The program at its point; `has_frozen`: some parameters are not trained; `unrecomputed` is the peak in bytes that the
    same step has without checkpointing, None where that is not known or nothing is recomputed."""

    side: Side
    has_frozen: bool = False
    unrecomputed: int | None = None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The operators in order."""
        return self.side.line.steps

    @cached_property
    def ranges(self) -> tuple[LiveRange, ...]:
        """The live ranges on the GPU."""
        return tuple(live for live in self.side.ranges.values() if live.storage.device == "gpu")

    @cached_property
    def numbers(self) -> list[int]:
        """Live bytes before the first operator, and while each runs."""
        found = self.side.line.evaluate(self.side.point)
        return [found.start, *found.running]

    @cached_property
    def peak(self) -> int:
        """The largest of them."""
        return max(self.numbers)

    @cached_property
    def at(self) -> int:
        """The operator of the peak; START before the first."""
        return self.side.peak_moment.op

    @cached_property
    def values(self) -> dict[str, Value]:
        """The first tensor in each storage."""
        found: dict[str, Value] = {}
        for value in (*self.side.flat.values, *(v for step in self.steps for v in step.op.results)):
            found.setdefault(value.storage, value)
        return found

    @cached_property
    def storage_of(self) -> dict[str, str]:
        """The storage of each value."""
        found = {value.name: value.storage for value in self.side.flat.values}
        return found | {value.name: value.storage for step in self.steps for value in step.op.results}

    @cached_property
    def learned(self) -> frozenset[str]:
        """Storages that a forward operator made from parameters, directly or not."""
        found = {s.name for s in self.side.flat.storages if s.kind == Kind.PARAMETER}
        for step in self.steps:
            if any(self.storage_of.get(operand) in found for operand in step.op.operands):
                found.update(value.storage for value in step.op.results)
        return frozenset(found)

    @cached_property
    def end_of_forward(self) -> int:
        """The last operator of the forward phases."""
        return max((i for i, s in enumerate(self.steps) if s.phase.name.rpartition(".")[2] == FORWARD), default=START)

    def phase(self, position: int | None) -> str:
        """The phase of an operator without its micro-batch; "" before the first."""
        return "" if position is None or position == START else self.steps[position].phase.name.rpartition(".")[2]

    def is_alive(self, live: LiveRange) -> bool:
        """Whether a storage is alive at the peak."""
        if live.made is None:
            return live.storage.live_in and (live.freed is None or live.freed >= self.at)
        return live.made <= self.at and (live.freed is None or live.freed >= self.at)

    def source(self, live: LiveRange) -> tuple[str, str, str]:
        """The operator that makes a storage, its module and its line; empty where it is alive before the step."""
        if live.made is None:
            return "", live.storage.of or live.storage.name, ""
        op = self.steps[live.made].op
        return op.opcode, op.path, op.source

    def operands(self, live: LiveRange) -> list[str]:
        """The storages that the operator reads which makes this one."""
        if live.made is None:
            return []
        return [self.storage_of[name] for name in self.steps[live.made].op.operands if name in self.storage_of]

    def whole(self, live: LiveRange, nbytes: Size | None = None) -> Cut:
        """The storage gone, or some of its bytes."""
        return Cut(live.storage.name, live.storage.nbytes if nbytes is None else nbytes, live.made, live.freed)

    def after_use(self, live: LiveRange) -> Cut:
        """The storage freed after its last use."""
        last = live.made if live.last_use is None else live.last_use
        return Cut(live.storage.name, live.storage.nbytes, 0 if last is None else last + 1, live.freed)

    def without(self, cuts: Iterable[Cut]) -> int:
        """The peak in bytes with these bytes gone."""
        length = len(self.numbers)
        change = [0] * (length + 1)
        for cut in cuts:
            nbytes = cut.nbytes.evaluate(self.side.point)
            first = 0 if cut.first is None else cut.first + 1  # the numbers begin before the first operator
            last = length - 1 if cut.last is None else cut.last + 1
            if first <= last:
                change[first] -= nbytes
                change[last + 1] += nbytes
        return max(number + less for number, less in zip(self.numbers, accumulate(change), strict=False))

    def at_peak(self, cuts: Iterable[Cut]) -> Size:
        """The polynomial of the bytes that are gone at the peak's place."""
        alive = [c for c in cuts if (c.first is None or c.first <= self.at) and (c.last is None or c.last >= self.at)]
        return sum((cut.nbytes for cut in alive), ZERO)


def grows_as(size: Size, **exponents: int) -> bool:
    """Whether a term of a size has at least these powers of B and S."""
    return any(all(dict(powers(monomial)).get(name, 0) >= e for name, e in exponents.items()) for monomial, _ in size.terms)
