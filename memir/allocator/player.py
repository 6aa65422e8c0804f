"""A schedule played on an allocator: which storage lies where, what was reserved at which operator, and the holes between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memir.allocator.oom import OutOfMemory, OutOfMemoryError
from memir.allocator.schedule import Move, Schedule
from memir.allocator.simulator import Allocator
from memir.allocator.sizes import round_size
from memir.allocator.state import Segment
from memir.ir.core import Kind


@dataclass(frozen=True, slots=True)
class Place:
    """An operator of one of the steps, both counted from 0; before the first step `phase` is "setup", and `op` -1."""

    step: int
    op: int
    phase: str
    opcode: str = ""
    path: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A storage next to a hole, and the operator that makes it (None: it is there before the step)."""

    storage: str
    kind: Kind
    nbytes: int
    made: Place | None


@dataclass(frozen=True, slots=True)
class Hole:
    """Free bytes that are reserved: a free block, its segment's size, and what lies before and after it in the segment."""

    nbytes: int
    segment: int
    is_small: bool
    before: Neighbour | None
    after: Neighbour | None


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The largest bytes during a phase of the last step."""

    phase: str
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The request that there was no memory for: by which operator, for which storage (None: its workspace)."""

    place: Place
    storage: str | None
    oom: OutOfMemory


class Player:
    """Plays a schedule on an allocator and knows which storage lies where.

    `placed` are storages that are in the allocator already, with their addresses: what loading has left there.
    """

    def __init__(self, plan: Schedule, allocator: Allocator, placed: Mapping[str, int] | None = None) -> None:
        self.plan = plan
        self.allocator = allocator
        self.addresses: dict[str, int] = dict(placed or {})
        self.marks: list[tuple[int, int, int]] = []  # for each operator: the allocator's events before it, step, operator
        self.names: dict[int, str] = {}  # the storage that an alloc event is for, "" for a workspace, by the event's number
        self.phases: list[PhasePeak] = []
        self.allocated_peak = 0  # before the peaks were last reset
        self.reserved_peak = 0
        self.rounded_peak = 0  # of the requests as they are rounded
        self.fullest = 0  # the request, counted from 1, with the most allocated while the most is reserved
        self._rounded = 0
        self._sizes: dict[int, int] = {}  # request -> rounded
        self._most = (-1, -1)  # reserved and allocated bytes then
        self._requests = 0
        self._until = 0
        self._at = (0, -1)
        self._storage: str | None = None
        self._rounded += sum(self._round(plan.sizes[name]) for name in self.addresses)

    def play(self, steps: int, until: int = 0) -> Failure | None:
        """Play so many steps, or only as far as the request `until`; the failure, if memory runs out."""
        self._until = until
        try:
            self._setup()
            for step in range(steps):
                self._step(step, last=step == steps - 1)
        except OutOfMemoryError as error:
            return Failure(self.place(), self._storage, error.oom)
        except _UntilError:
            pass
        return None

    def place(self) -> Place:
        """The operator that is being played."""
        step, number = self._at
        return Place(step, -1, "setup") if number < 0 else _place(step, number, self.plan.moves[number])

    def _setup(self) -> None:
        self.marks.append((0, *self._at))
        for name in self.plan.before:
            if name not in self.addresses:
                self._malloc(name)

    def _step(self, step: int, last: bool) -> None:
        plan = self.plan
        if step:
            # what a step expects of the one before and that has left nothing like it
            for name, storage in plan.storages.items():
                if storage.live_in and name not in self.addresses:
                    self._malloc(name)
        phase = ""
        for number, move in enumerate(plan.moves):
            if last and move.phase != phase:
                self._end_phase(phase)
                phase = move.phase
            self._at = (step, number)
            self.marks.append((len(self.allocator.events), step, number))
            self._move(move, first=step == 0)
        if last:
            self._end_phase(phase)
        left = {name: self.addresses.pop(name) for name in plan.heirs}
        self.addresses.update((heir, left[name]) for name, heir in plan.heirs.items())
        for name in [name for name in self.addresses if not plan.storages[name].live_in]:
            self._free(self.addresses.pop(name), plan.sizes[name])

    def _move(self, move: Move, first: bool) -> None:
        """One operator; `first`: in the first step."""
        if first:
            for name in move.first:
                self._malloc(name)
        for name in move.allocates:
            self._malloc(name, move.op.stream)
        if first:
            for nbytes in move.kept:
                self._request(nbytes, move.op.stream)
        if move.scratch:
            self._free(self._request(move.scratch, move.op.stream), move.scratch)
        for name in move.frees:
            if name in self.addresses:  # in the first step there is nothing of a step before
                self._free(self.addresses.pop(name), self.plan.sizes[name])

    def _malloc(self, name: str, stream: str = "") -> None:
        self._storage = name
        self.addresses[name] = self._request(self.plan.sizes[name], stream)
        self._storage = None

    def _request(self, nbytes: int, stream: str) -> int:
        allocator = self.allocator
        address = allocator.malloc(nbytes, stream)
        self._requests += 1
        if nbytes and allocator.events:  # a list is kept
            self.names[len(allocator.events) - 1] = self._storage or ""
        self._rounded += self._round(nbytes)
        self.rounded_peak = max(self.rounded_peak, self._rounded)
        now = (allocator.reserved, allocator.allocated)
        if now > self._most:
            self._most, self.fullest = now, self._requests
        if self._requests == self._until:
            raise _UntilError
        return address

    def _free(self, address: int, nbytes: int) -> None:
        self.allocator.free(address)
        self._rounded -= self._round(nbytes)

    def _round(self, nbytes: int) -> int:
        size = self._sizes.get(nbytes)
        if size is None:
            size = self._sizes[nbytes] = round_size(nbytes, self.allocator.settings) if nbytes else 0
        return size

    def _end_phase(self, phase: str) -> None:
        """Note the peaks since the phase began, and begin anew."""
        allocator = self.allocator
        self.allocated_peak = max(self.allocated_peak, allocator.peak_allocated)
        self.reserved_peak = max(self.reserved_peak, allocator.peak_reserved)
        if phase:
            self.phases.append(PhasePeak(phase, allocator.peak_allocated, allocator.peak_reserved))
        allocator.reset_peaks()

    def holes(self, number: int) -> tuple[Hole, ...]:
        """The largest free blocks now, and the storages around them."""
        names = {address: name for name, address in self.addresses.items() if address}
        makers = {name: (n, move) for n, move in enumerate(self.plan.moves) for name in move.allocates}

        def neighbour(segment: Segment, place: int) -> Neighbour | None:
            name = names.get(segment.blocks[place].address) if 0 <= place < len(segment.blocks) else None
            if name is None:
                return None
            storage = self.plan.storages[name]
            made = None
            if name in makers:
                step, number = self._at
                made = _place(step - (makers[name][0] > number), *makers[name])  # what comes later here is of the step before
            return Neighbour(name, storage.kind, self.plan.sizes[name], made)

        found = [
            (block.size, segment, place)
            for segment in self.allocator.snapshot()
            for place, block in enumerate(segment.blocks)
            if block.state == "inactive"
        ]
        found.sort(key=lambda hole: -hole[0])
        return tuple(
            Hole(size, segment.size, segment.is_small, neighbour(segment, place - 1), neighbour(segment, place + 1))
            for size, segment, place in found[:number]
        )


class _UntilError(Exception):
    """The request was reached until which there was to be played."""


def _place(step: int, number: int, move: Move) -> Place:
    return Place(step, number, move.phase, move.op.opcode, move.op.path, move.op.source)
