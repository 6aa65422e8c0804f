"""A recorded snapshot played again: the simulated allocator gets the recorded requests, and puts each block where it will.

It is given the addresses that cudaMalloc returned, and where the cache was emptied; nothing else of what the real one decided.
A recording that begins in the middle of a run does not have the state before it: that is reckoned backwards from the segments
at its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memir.allocator.oom import OutOfMemoryError
from memir.allocator.settings import MIB, Settings
from memir.allocator.simulator import Allocator
from memir.allocator.sizes import SMALL_SEGMENT, round_size
from memir.allocator.state import BlockInfo
from memir.allocator.state import Segment as Layout
from memir.errors import UsageError
from memir.recorded.history import history
from memir.recorded.recording import Event, Recording


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far the simulation went the way of the recording."""

    num_requests: int
    num_elsewhere: int  # requests that it puts at another address
    num_segments: int  # events of segments: alloc, free, map, unmap
    num_other_segments: int  # of them, those that one of the two has and the other has not
    num_failures: int  # out of memory
    num_other_failures: int  # of them, those that it does not have, or with other free memory
    is_same_layout: bool  # every segment and block at the end

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not (self.num_elsewhere or self.num_other_segments or self.num_other_failures) and self.is_same_layout


def replay(recording: Recording, settings: Settings) -> Replayed:
    """Play the recording's requests. UsageError for expandable segments that were there before it began."""
    events = recording.events
    allocator = Allocator(settings, _capacity(recording), addresses=_addresses(events))
    start = beginning(recording, settings)
    if start and settings.expandable_segments:
        raise UsageError("the recording begins with expandable segments, whose address space it does not tell")
    allocator.adopt(start)
    begun = len(allocator.events)
    requests = elsewhere = failures = other_failures = 0
    moved: dict[int, int] = {}  # recorded address -> the one here, where they differ
    for number, event in enumerate(events):
        following = events[number + 1].action if number + 1 < len(events) else ""
        if event.action == "alloc":
            requests += 1
            address = allocator.malloc(event.size, _stream(event.stream))
            moved.pop(event.address, None)
            if address != event.address:
                elsewhere += 1
                moved[event.address] = address
        elif event.action == "free_requested":
            allocator.free(moved.pop(event.address, event.address))
        elif event.action == "segment_free" and following != "segment_free":
            allocator.empty_cache()
        elif event.action == "oom":
            failures += 1
            try:
                allocator.malloc(event.size, _stream(event.stream))
                other_failures += 1
            except OutOfMemoryError as error:
                other_failures += error.oom.free != event.address
    ours = Counter((e.action, e.address, e.size) for e in allocator.events[begun:] if e.action.startswith("segment"))
    theirs = Counter((e.action, e.address, e.size) for e in events if e.action.startswith("segment"))
    return Replayed(
        requests,
        elsewhere,
        theirs.total(),
        ((ours - theirs) + (theirs - ours)).total(),
        failures,
        other_failures,
        _layout_of(recording) == {(s.address, s.size): _blocks_of(s) for s in allocator.snapshot()},
    )


def _addresses(events: Sequence[Event]) -> list[int]:
    """What cudaMalloc returned, and where the address space of each stream's and pool's expandable segment begins."""
    found, known = [], set()
    for event in events:
        space = (event.stream, event.size == SMALL_SEGMENT)
        if event.action == "segment_alloc" or (event.action == "segment_map" and space not in known):
            found.append(event.address)
        if event.action == "segment_map":
            known.add(space)
    return found


def _capacity(recording: Recording) -> int | None:
    """The memory that there was, as the first failure tells: what was reserved then, and what was free."""
    at = next((number for number, event in enumerate(recording.events) if event.action == "oom"), None)
    if at is None:
        return None
    return history(recording, "the recording").at(at).reserved + recording.events[at].address


def _layout_of(recording: Recording) -> dict[tuple[int, int], list[tuple[int, int, bool]]]:
    return {(s.address, s.size): [(b.address, b.size, b.active) for b in s.blocks] for s in recording.segments}


def _blocks_of(segment: Layout) -> list[tuple[int, int, bool]]:
    return [(block.address, block.size, block.state != "inactive") for block in segment.blocks]


def _stream(number: int) -> str:
    return str(number) if number else ""


def beginning(recording: Recording, settings: Settings) -> list[Layout]:
    """Segments and blocks before the first event."""
    if history(recording, "the recording").start.reserved == 0:
        return []
    segments = {s.address: (s.size, s.stream, s.is_small) for s in recording.segments}
    active: dict[int, tuple[int, int | None]] = {}  # address -> requested, and the block's size where it is known
    for segment in recording.segments:
        active.update((block.address, (block.requested, block.size)) for block in segment.blocks if block.active)
    for event in reversed(recording.events):
        if event.action == "segment_alloc":
            del segments[event.address]
        elif event.action == "segment_free":
            segments[event.address] = (event.size, event.stream, event.size == SMALL_SEGMENT)
        elif event.action == "alloc":
            del active[event.address]
        elif event.action == "free_requested":
            active[event.address] = (event.size, None)
    starts = _block_starts(recording.events)
    addresses = sorted(active)
    return [_segment(address, *what, addresses, active, starts, settings) for address, what in sorted(segments.items())]


def _block_starts(events: Sequence[Event]) -> dict[int, int]:
    """Where blocks begin that are allocated in the recording, with the number of the first event that says so."""
    found: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            found.setdefault(event.address, number)
    return found


def _segment(
    address: int,
    size: int,
    stream: int,
    is_small: bool,
    addresses: Sequence[int],
    active: Mapping[int, tuple[int, int | None]],
    starts: Mapping[int, int],
    settings: Settings,
) -> Layout:
    """One segment at the beginning, its free blocks between the active ones."""
    inside = addresses[bisect_left(addresses, address) : bisect_left(addresses, address + size)]
    blocks: list[BlockInfo] = []
    at = address
    for number, place in enumerate(inside):
        if place > at:
            blocks.append(BlockInfo(at, place - at, 0, "inactive"))
        requested, nbytes = active[place]
        if nbytes is None:
            following = inside[number + 1] if number + 1 < len(inside) else address + size
            nbytes = _unsplit(place, round_size(requested, settings), following, is_small, starts)
        blocks.append(BlockInfo(place, nbytes, requested, "active_allocated"))
        at = place + nbytes
    if at < address + size:
        blocks.append(BlockInfo(at, address + size - at, 0, "inactive"))
    return Layout(address, size, _stream(stream), is_small, False, tuple(blocks))


def _unsplit(place: int, nbytes: int, following: int, is_small: bool, starts: Mapping[int, int]) -> int:
    """The size of a block that is freed in the recording, with the rest of at most 1 MiB that was not split off.

    A gap as small as that before the next block can be nothing else. In a larger gap the rest ends where a block is allocated
    later, if one is.
    """
    end = place + nbytes
    if is_small or end == following:
        return nbytes
    if following - end <= MIB:
        return following - place
    return min((start for start in starts if end <= start <= end + MIB), key=lambda start: starts[start], default=end) - place
