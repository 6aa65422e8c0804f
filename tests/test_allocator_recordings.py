"""The benchmark that plays recordings again finds what is alike and what is not; an allocator goes on from a snapshot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.allocator.replay import Replayed, replay
from memir.allocator.settings import parse_settings
from memir.allocator.simulator import Allocator
from memir.backends.snapshot import Snapshot
from memir.errors import UsageError
from memir.ir.parser import parse
from memir.ir.unroll import bind
from memir.recorded.recording import parse_recording
from tests import programs
from tests.test_allocator_properties import TEXTS, play, sequences
from tests.test_allocator_replay import STEP, M

CONFIGURATIONS = ("", "max_split_size_mb:20", "expandable_segments:True")


def replayed(data: dict[str, Any], text: str = "") -> Replayed:
    return replay(parse_recording(data, "mem.pickle"), parse_settings(text))


@given(st.data(), st.sampled_from(CONFIGURATIONS), st.sampled_from(("last", "all")))
def test_what_was_exported_goes_the_same_way_again(data: st.DataObject, text: str, record: str) -> None:
    program = data.draw(programs.programs())
    env = data.draw(programs.points(program))
    exported = Snapshot(text, 2, record).build(bind(program, env))
    assume(exported["device_traces"][0])
    # a block of which a rest was not split off, next to a free one, cannot be told from the end alone
    assume(record == "all" or all(e["size"] <= M or e["size"] % (2 * M) == 0 for e in exported["device_traces"][0]))
    if record == "last" and text.startswith("expandable") and exported["segments"]:
        return
    assert replayed(exported, text).agrees


def test_the_figures() -> None:
    exported = Snapshot(record="all").build(bind(parse(STEP), {"B": 1}))
    assert replayed(exported) == Replayed(16, 0, 5, 0, 0, 0, True)
    assert replayed(Snapshot().build(bind(parse(STEP), {"B": 1}))) == Replayed(4, 0, 0, 0, 0, 0, True)


def test_a_failure_is_met_again() -> None:
    exported = Snapshot(record="all", capacity=55 * M).build(bind(parse(STEP), {"B": 1}))
    found = replayed(exported)
    assert (found.num_failures, found.num_other_failures, found.num_elsewhere) == (1, 0, 0)


def test_what_goes_another_way_is_counted() -> None:
    exported = Snapshot(record="all").build(bind(parse(STEP), {"B": 1}))
    other = copy.deepcopy(exported)
    event = next(e for e in other["device_traces"][0] if e["frames"][0]["name"] == "workspace")
    moved = event["addr"] + M
    for later in other["device_traces"][0]:
        if later["addr"] == event["addr"] and later is not event and later["action"] != "alloc":
            later["addr"] = moved
            if later["action"] == "free_completed":
                break
    event["addr"] = moved
    found = replayed(other)
    assert (found.num_elsewhere, found.is_same_layout, found.agrees) == (1, True, False)
    assert not replayed(exported, "max_split_size_mb:20").agrees
    with pytest.raises(UsageError, match="begins with expandable segments"):
        replayed(Snapshot("expandable_segments:True").build(bind(parse(STEP), {"B": 1})), "expandable_segments:True")


@given(st.sampled_from([t for t in TEXTS if "threshold" not in t]), sequences, sequences)
def test_an_allocator_goes_on_from_a_snapshot(
    text: str, before: list[tuple[str, int, str]], after: list[tuple[str, int, str]]
) -> None:
    """But for expandable segments, whose address space a snapshot does not tell, and uses on other streams, which it does not
    have."""
    played = play(text, None, [request for request in before if request[0] != "record_stream"])
    first = played.allocator
    segments = first.snapshot()
    if any(segment.is_expandable for segment in segments):
        with pytest.raises(ValueError, match="expandable"):
            Allocator(parse_settings(text)).adopt(segments)
        return
    assume("expandable" not in text)
    alive = list(played.alive)
    seen = len(first.events)
    requests = [(what, number, stream) for what, number, stream in after if what in ("malloc", "free", "empty_cache")]
    going_on(first, list(alive), requests)
    addresses = [event.address for event in first.events[seen:] if event.action == "segment_alloc"]
    second = Allocator(parse_settings(text), addresses=addresses)
    second.adopt(segments)
    assert second.snapshot() == segments
    going_on(second, list(alive), requests)
    assert second.events == first.events[seen:]
    assert (second.allocated, second.requested, second.reserved) == (first.allocated, first.requested, first.reserved)
    assert second.snapshot() == first.snapshot()


def going_on(allocator: Allocator, alive: list[int], requests: list[tuple[str, int, str]]) -> None:
    for what, number, stream in requests:
        if what == "malloc":
            alive.append(allocator.malloc(number, stream))
        elif what == "empty_cache":
            allocator.empty_cache()
        elif alive:
            allocator.free(alive.pop(number % len(alive)))
