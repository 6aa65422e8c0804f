"""Properties of the allocator under any sequence of requests, with any settings."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memir.allocator
from memir.allocator.oom import OutOfMemoryError
from memir.allocator.settings import parse_settings
from memir.allocator.simulator import Allocator
from memir.allocator.sizes import SMALL, round_size, segment_size

M = 2**20
TEXTS = (
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:32,max_non_split_rounding_mb:24",
    "roundup_power2_divisions:[2:8,16:4,>:2]",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
    "large_segment_size_mb:12",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32",
    "expandable_segments:True,large_segment_size_mb:14,garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
)
STREAMS = ("", "comm", "copy")

sizes = st.one_of(
    st.integers(0, 5000),
    st.integers(0, 3 * M),
    st.sampled_from((512, M - 512, M, M + 1, 2 * M, 9 * M, 10 * M - 512, 10 * M, 11 * M, 19 * M, 20 * M, 21 * M, 33 * M)),
    st.integers(0, 60 * M),
)
requests = st.tuples(st.just("malloc"), sizes, st.sampled_from(STREAMS))
others = st.tuples(
    st.sampled_from(("free", "free", "free", "free", "record_stream", "synchronize", "empty_cache", "reset_peaks")),
    st.integers(0, 1000),
    st.sampled_from(STREAMS),
)
sequences = st.lists(st.one_of(requests, others), max_size=60)
capacities = st.sampled_from((None, 0, 2 * M, 50 * M, 100 * M, 300 * M))


@dataclass
class Played:
    """An allocator after a sequence, what is alive in it (address -> requested bytes), and what the requests alone tell."""

    allocator: Allocator
    limited: bool
    alive: dict[int, int] = field(default_factory=dict)
    streams: dict[int, str] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # alive, and used on another stream too
    pending: int = 0  # bytes requested by blocks that were freed while another stream used them
    bound: int = 0  # a segment for every request
    peak: int = 0
    failures: int = 0


def play(text: str, capacity: int | None, sequence: list[tuple[str, int, str]], check: bool = False) -> Played:
    settings = parse_settings(text)
    total = 300 * M if capacity is None and settings.per_process_memory_fraction < 1 else capacity
    played = Played(Allocator(settings, capacity, total=total), limited=total is not None)
    for what, number, stream in sequence:
        if what == "malloc":
            malloc(played, number, stream)
        elif what in ("free", "record_stream"):
            if played.alive:
                use(played, what, list(played.alive)[number % len(played.alive)], stream)
        else:
            other(played, what)
        played.peak = max(played.peak, played.allocator.allocated)
        if check:
            invariants(played)
    return played


def malloc(played: Played, number: int, stream: str) -> None:
    a, settings = played.allocator, played.allocator.settings
    if number:
        size, granule = round_size(number, settings), settings.large_segment_size
        # an expandable segment maps whole granules, of which the request may touch one more than it fills
        played.bound += (size // granule + 2) * granule if settings.expandable_segments else segment_size(size, settings)
    oom = None
    try:
        address = a.malloc(number, stream)
    except OutOfMemoryError as error:
        oom = error.oom
    if oom is not None:
        played.failures += 1
        played.pending = 0  # it has waited for the other streams
        assert played.limited
        assert (oom.requested, oom.allocated, oom.reserved) == (number, a.allocated, a.reserved)
    elif number:
        assert address not in played.alive
        played.alive[address], played.streams[address] = number, stream


def use(played: Played, what: str, address: int, stream: str) -> None:
    if what == "free":
        played.allocator.free(address)
        number = played.alive.pop(address)
        if address in played.used:
            played.used.discard(address)
            played.pending += number
    else:
        played.allocator.record_stream(address, stream)
        if stream != played.streams[address]:
            played.used.add(address)


def other(played: Played, what: str) -> None:
    getattr(played.allocator, what)()
    if what == "reset_peaks":
        played.peak = played.allocator.allocated
    else:
        played.pending = 0


def invariants(played: Played) -> None:
    """What holds at every moment."""
    a = played.allocator
    segments = a.snapshot()
    end = 0
    blocks = []
    for segment in segments:
        assert segment.address >= end, "segments do not overlap"
        at = segment.address
        previous = "active"
        for block in segment.blocks:
            assert block.address == at, "blocks tile their segment"
            assert block.size > 0
            assert block.size % 512 == 0
            assert not (block.state == previous == "inactive"), "free neighbours are merged"
            previous = block.state
            at += block.size
        end = segment.address + segment.size
        assert at == end
        assert end < 2**53
        blocks += [(block, segment) for block in segment.blocks]
    active = {block.address: (block, segment) for block, segment in blocks if block.state == "active_allocated"}
    assert active.keys() == played.alive.keys()
    for address, requested in played.alive.items():
        block, segment = active[address]
        size = round_size(requested, a.settings)
        assert block.requested == requested
        assert block.size >= size
        assert segment.is_small == (size <= SMALL)
        assert segment.stream == played.streams[address]
        assert segment.is_expandable == a.settings.expandable_segments
        if segment.is_small or segment.is_expandable:
            assert block.size == size, "the rest is split off"
        elif a.settings.max_split_size is None:
            assert block.size <= size + M, "a rest of more than 1 MiB is split off"
    # conservation: every byte that was taken from the device is in a block, every byte asked for in an active one
    assert sum(segment.size for segment in segments) == a.reserved
    assert sum(block.size for block, _ in active.values()) == a.allocated
    assert sum(played.alive.values()) <= a.requested <= sum(played.alive.values()) + played.pending
    assert a.allocated <= a.reserved <= played.bound
    assert a.allocated <= a.peak_allocated == played.peak
    assert a.reserved <= a.peak_reserved <= played.bound
    state = a._state
    free = {block.address: block.size for block, _ in blocks if block.state == "inactive"}
    pools = {block.address: block.size for pool in (state.small, state.large) for block in pool}
    assert pools == free, "the free lists hold the free blocks"
    assert len(pools) == len(state.small) + len(state.large)
    for pool in (state.small, state.large):
        keys = [(STREAMS.index(b.stream), b.size, b.address) for b in pool]
        by_stream = {s: [k[1:] for k in keys if k[0] == s] for s, _, _ in keys}
        assert all(found == sorted(found) for found in by_stream.values())
    if a.settings.large_segment_size % (2 * M) == 0:
        assert state.device.used == a.reserved
    if state.device.capacity is not None:
        assert state.device.used <= state.device.capacity
    if state.allowed is not None and not a.settings.expandable_segments:
        assert a.reserved <= state.allowed


@given(st.sampled_from(TEXTS), capacities, sequences)
def test_the_invariants_hold_after_every_request(text: str, capacity: int | None, sequence: list[tuple[str, int, str]]) -> None:
    play(text, capacity, sequence, check=True)


@given(st.sampled_from(TEXTS), capacities, sequences)
def test_freeing_everything_gives_all_memory_back(
    text: str, capacity: int | None, sequence: list[tuple[str, int, str]]
) -> None:
    played = play(text, capacity, sequence)
    a = played.allocator
    for address in played.alive:
        a.free(address)
    a.empty_cache()
    assert (a.allocated, a.requested, a.reserved, a.snapshot()) == (0, 0, 0, ())
    assert a._state.device.used == 0
    assert not a._state.active


@given(st.sampled_from(TEXTS), capacities, sequences)
def test_the_same_requests_give_the_same_events(text: str, capacity: int | None, sequence: list[tuple[str, int, str]]) -> None:
    first, second = play(text, capacity, sequence), play(text, capacity, sequence)
    assert first.allocator.events == second.allocator.events
    assert first.allocator.snapshot() == second.allocator.snapshot()


@given(st.sampled_from(TEXTS), capacities, sequences)
def test_the_events_alone_give_the_figures(text: str, capacity: int | None, sequence: list[tuple[str, int, str]]) -> None:
    """What is reserved and asked for follows from the list of events, and each address in it is of memory that is mapped."""
    played = play(text, capacity, sequence)
    reserved = requested = failures = 0
    mapped: set[int] = set()  # pages of 1 MiB
    allocated: dict[int, int] = {}
    for event in played.allocator.events:
        pages = set(range(event.address // M, -(-(event.address + event.size) // M)))
        if event.action in ("segment_alloc", "segment_map"):
            assert not pages & mapped
            mapped |= pages
            reserved += event.size
        elif event.action in ("segment_free", "segment_unmap"):
            assert pages <= mapped
            mapped -= pages
            reserved -= event.size
        elif event.action == "alloc":
            assert pages <= mapped
            assert event.address not in allocated
            allocated[event.address] = event.size
            requested += event.size
        elif event.action == "free_completed":
            assert allocated.pop(event.address) == event.size
            requested -= event.size
        elif event.action == "oom":
            failures += 1
    assert (reserved, requested, failures) == (played.allocator.reserved, played.allocator.requested, played.failures)


@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 30 * M), max_size=30))
def test_without_a_list_of_events_addresses_are_the_same(text: str, step: list[int]) -> None:
    recording, quiet = (Allocator(parse_settings(text), 2000 * M, record=record) for record in (True, False))
    for number, size in enumerate(step):
        address = recording.malloc(size)
        assert quiet.malloc(size) == address
        if number % 3:
            recording.free(address)
            quiet.free(address)
    assert quiet.events == []
    assert quiet.snapshot() == recording.snapshot()


@pytest.mark.parametrize("path", sorted(Path(memir.allocator.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_stands_alone(path: Path) -> None:
    """All of the package but what plays programs knows only memir's errors."""
    if path.stem in ("replay", "player", "schedule", "room", "loading"):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memir"):
            assert node.module is not None
            assert node.module.startswith(("memir.allocator", "memir.errors")), f"{path.name}:{node.lineno}"
            assert node.module.split(".")[-1] not in ("replay", "player", "schedule", "loading"), f"{path.name}:{node.lineno}"
