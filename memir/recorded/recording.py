"""A memory snapshot as typed data, checked while it is read: torch.cuda.memory._snapshot(), torch/csrc/cuda/Module.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar, get_args

from memir.allocator.state import Action
from memir.errors import UsageError
from memir.recorded.unpickle import RECORD, read_pickle

ACTIONS = frozenset(get_args(Action))
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a segment at the end of the recording; bytes."""

    address: int
    size: int
    requested: int
    active: bool  # allocated, or freed and still in use by another stream


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that is reserved at the end of the recording, tiled by its blocks."""

    address: int
    size: int
    blocks: tuple[Block, ...]
    stream: int
    is_small: bool  # of the pool for requests up to 1 MiB


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the allocator did. `size` is what was requested for alloc and free, the segment's for the others."""

    action: Action
    address: int  # for oom the device's free memory instead
    size: int
    stream: int
    time: int | None  # microseconds; None in snapshots before torch 2.3
    frames: Sequence[object]  # as recorded, innermost first; `frame_texts` makes them text


@dataclass(frozen=True, slots=True)
class Annotation:
    """A stretch of time with a name: record_function under global_record_annotations."""

    name: str
    start: int
    end: int | None  # None: it was still going on


@dataclass(frozen=True, slots=True)
class Recording:
    """One device's snapshot."""

    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    annotations: tuple[Annotation, ...]


def read_recording(path: Path, device: int | None = None) -> Recording:
    """A recorded snapshot from its file.

    UsageError: no snapshot, one of another version, one without a history of events, or of several devices without `device`.
    """
    return parse_recording(read_pickle(path), str(path), device)


def parse_recording(root: object, where: str, device: int | None = None) -> Recording:
    """A snapshot from the plain data that a pickle holds; errors as `read_recording`."""
    reader = _Reader(where)
    if isinstance(root, list):
        reader.fail("it is a list, as torch.cuda.memory_snapshot() returns it, and has no history of events")
    if not isinstance(root, dict) or "segments" not in root:
        reader.fail(f"it is {_kind(root)} without 'segments'")
    if "device_traces" not in root:
        reader.fail("it has no 'device_traces': torch before 2.0 wrote it, or something else")
    traces = reader.take(root, "device_traces", list, "")
    segments = reader.take(root, "segments", list, "")
    device = reader.device(device, segments, traces)
    found = [
        reader.segment(s, f"segments[{i}]")
        for i, s in enumerate(segments)
        if reader.number(s, "device", f"segments[{i}]", 0) == device
    ]
    trace = traces[device] if device < len(traces) else []
    events = [
        reader.event(e, f"device_traces[{device}][{i}]")
        for i, e in enumerate(reader.is_a(trace, list, f"device_traces[{device}]"))
    ]
    kept = tuple(event for event in events if event is not None)
    if not kept:
        raise UsageError(
            f"{where} has no events of device {device}: the history was not recorded", hint=f"record it:  {RECORD}"
        )
    annotations = reader.annotations(root.get("external_annotations", []), device)
    return Recording(tuple(sorted(found, key=lambda segment: segment.address)), kept, annotations)


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, message: str) -> NoReturn:
        raise UsageError(f"{self.where} is no memory snapshot that memir knows: {message}", hint=f"record one:  {RECORD}")

    def is_a(self, value: object, kind: type[T], place: str) -> T:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(f"{place} is {_kind(value)}, not {kind.__name__}")
        return value

    def take(self, data: object, key: str, kind: type[T], place: str) -> T:
        found = self.is_a(data, dict, place or "it")
        if key not in found:
            self.fail(f"{place or 'it'} has no {key!r}")
        return self.is_a(found[key], kind, f"{place}.{key}" if place else key)

    def number(self, data: object, key: str, place: str, default: int | None = None) -> int:
        """A whole number that is not negative."""
        found = self.is_a(data, dict, place)
        if key not in found and default is not None:
            return default
        number = self.take(found, key, int, place)
        if number < 0:
            self.fail(f"{place}.{key} is {number}")
        return number

    def device(self, device: int | None, segments: Sequence[object], traces: Sequence[object]) -> int:
        """The device that is meant: the asked one, or the only one with anything."""
        known = {i for i, trace in enumerate(traces) if trace}
        known |= {self.number(s, "device", f"segments[{i}]", 0) for i, s in enumerate(segments)}
        names = ", ".join(map(str, sorted(known))) or "none"
        if device is not None:
            if device not in known:
                raise UsageError(f"{self.where} has nothing of device {device}", hint=f"it has: {names}")
            return device
        if len(known) > 1:
            raise UsageError(f"{self.where} is of several devices: {names}", hint="say which:  --device 0")
        return known.pop() if known else 0

    def segment(self, data: object, place: str) -> Segment:
        address = self.number(data, "address", place)
        size = self.number(data, "total_size", place)
        blocks = []
        at = address
        for i, block in enumerate(self.take(data, "blocks", list, place)):
            here = f"{place}.blocks[{i}]"
            if isinstance(block, dict) and "requested_size" not in block:
                self.fail(f"{here} has no 'requested_size': a torch before 2.1 wrote it")
            nbytes = self.number(block, "size", here)
            active = self.take(block, "state", str, here) != "inactive"
            blocks.append(Block(at, nbytes, self.number(block, "requested_size", here) if active else 0, active))
            at += nbytes
        if at != address + size:
            self.fail(f"the blocks of {place} have {at - address:,} bytes, and it has {size:,}")
        small = isinstance(data, dict) and data.get("segment_type") == "small"
        return Segment(address, size, tuple(blocks), self.number(data, "stream", place, 0), small)

    def event(self, data: object, place: str) -> Event | None:
        """None for what is no matter of memory: snapshot, user_defined, and what later versions have."""
        action = self.take(data, "action", str, place)
        if action not in ACTIONS:
            return None
        assert isinstance(data, dict)
        address = self.number(data, "device_free" if action == "oom" else "addr", place)
        time = self.number(data, "time_us", place) if "time_us" in data else None
        frames = self.is_a(data.get("frames", []), list, f"{place}.frames")
        size, stream = self.number(data, "size", place), self.number(data, "stream", place, 0)
        # mypy: checked against the very list that the type is made of
        return Event(action, address, size, stream, time, frames)  # type: ignore[arg-type]

    def annotations(self, data: object, device: int) -> tuple[Annotation, ...]:
        """Pairs of START and END; those of one name end in the reverse order."""
        found: list[Annotation] = []
        open_: dict[str, list[int]] = {}
        for i, entry in enumerate(self.is_a(data, list, "external_annotations")):
            place = f"external_annotations[{i}]"
            if self.number(entry, "device", place, 0) != device or not {"stage", "name", "time_us"} <= entry.keys():
                continue
            name, time = self.take(entry, "name", str, place), self.number(entry, "time_us", place)
            if entry["stage"] == "START":
                open_.setdefault(name, []).append(len(found))
                found.append(Annotation(name, time, None))
            elif open_.get(name):
                begun = open_[name].pop()
                found[begun] = Annotation(name, found[begun].start, time)
        return tuple(found)


def frame_texts(event: Event) -> tuple[str, ...]:
    """The frames as `file:line name`, innermost first; they are for people, so that any form will do."""
    return tuple(
        f"{f.get('filename', '?')}:{f.get('line', '?')} {f.get('name', '?')}" if isinstance(f, Mapping) else str(f)
        for f in event.frames
    )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"a{'n' if name[0] in 'aeiou' else ''} {name}"
