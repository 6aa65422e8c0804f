"""The predicted timeline as a CUDA memory snapshot, which `torch.cuda._memory_viz` and PyTorch's public viewer open.

    {"segments": [{"address": ..., "total_size": ..., "blocks": [...], ...}],
     "device_traces": [[{"action": "alloc", "addr": ..., "size": ..., "frames": [...], ...}, ...]], ...}

The form is that of `torch.cuda.memory._dump_snapshot` (torch/csrc/cuda/Module.cpp, torch/cuda/memory.py), with nothing but
dicts, lists, strings and numbers in it, pickled with protocol 4: some viewers refuse 5. Where a recorded snapshot has Python
frames, this one has the operator with its storage, then the user's line with the module. Time counts events, and the phases
are annotations, as record_function("forward") makes them under `_record_memory_history(global_record_annotations=True)`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from memir.allocator.player import Player
from memir.allocator.replay import STEPS
from memir.allocator.schedule import schedule
from memir.allocator.settings import VARIABLE, Settings, parse_settings
from memir.allocator.simulator import Allocator
from memir.allocator.state import Event
from memir.errors import UsageError
from memir.ir.core import Op, Program

PROTOCOL = 4
RECORDS = ("last", "all")

Frames = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot after `steps` steps under these allocator settings.

    `record` says which events it has: those of the last step, before which all else was allocated, or "all" from an empty GPU
    on. With a `capacity` in bytes that is too small, the last event is the failure.
    """

    name: ClassVar[str] = "snapshot"
    settings: str = ""  # as in PYTORCH_CUDA_ALLOC_CONF
    steps: int = STEPS
    record: str = "last"
    capacity: int | None = None

    def emit(self, program: Program, out: BinaryIO) -> None:
        """Write the pickle. The program's sizes have to be numbers (`bind` it); errors as memir.allocator.replay.simulate."""
        pickle.dump(self.build(program), out, protocol=PROTOCOL)

    def build(self, program: Program) -> dict[str, Any]:
        """The snapshot as plain data."""
        if self.record not in RECORDS:
            raise UsageError(f"record is {' or '.join(RECORDS)}, not {self.record!r}")
        if self.steps < 1:
            raise UsageError(f"{self.steps} steps cannot be played")
        settings = parse_settings(self.settings)
        player = Player(schedule(program, {}), Allocator(settings, self.capacity))
        player.play(self.steps)
        writer = _Writer(player, last=self.record == "last")
        trace = writer.trace()  # which learns who made the blocks
        return {
            "segments": writer.segments(),
            "device_traces": [trace],
            "external_annotations": writer.annotations(),
            "allocator_settings": _settings(settings, self.settings),
        }


class _Writer:
    """Turns what a player has done into plain data: all events, or those of the `last` step."""

    def __init__(self, player: Player, last: bool) -> None:
        self._player = player
        starts = [events for events, _, number in player.marks if number == 0]
        self._first = starts[-1] if last and starts else 0
        self._frames: dict[tuple[int, str | None], Frames] = {}
        self._streams = {"": 0}
        self._makers: dict[int, Frames] = {}  # of the block that was last allocated at an address

    def trace(self) -> list[dict[str, Any]]:
        """The events with the frames of the operators that caused them."""
        player, found = self._player, []
        marks = iter([*player.marks[1:], (len(player.allocator.events), 0, 0)])
        (end, _, following), number = next(marks), player.marks[0][2]
        owners: dict[int, str] = {}  # address -> the storage there
        for place, event in enumerate(player.allocator.events):
            while place >= end:
                number = following
                end, _, following = next(marks)
            if event.action == "alloc":
                owners[event.address] = player.names[place]
            owner = owners.get(event.address) if event.action in ("alloc", "free_requested", "free_completed") else None
            frames = self._frames_of(number, owner)
            if event.action == "alloc":
                self._makers[event.address] = frames
            if place >= self._first:
                found.append(self._event(event, place - self._first, frames))
        return found

    def segments(self) -> list[dict[str, Any]]:
        """All segments at the end, each tiled by its blocks."""
        found = []
        for segment in self._player.allocator.snapshot():
            blocks = [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": block.state,
                    "frames": [] if block.state == "inactive" else self._makers[block.address],
                }
                for block in segment.blocks
            ]
            active = [block for block in segment.blocks if block.state != "inactive"]
            found.append(
                {
                    "device": 0,
                    "address": segment.address,
                    "total_size": segment.size,
                    "allocated_size": sum(b.size for b in active if b.state == "active_allocated"),
                    "active_size": sum(b.size for b in active),
                    "requested_size": sum(b.requested for b in active),
                    "stream": self._stream(segment.stream),
                    "segment_type": "small" if segment.is_small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": segment.is_expandable,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return found

    def annotations(self) -> list[dict[str, Any]]:
        """Where each phase begins and ends."""
        player, found = self._player, []
        phase = ""
        for events, _, number in [*player.marks, (len(player.allocator.events), 0, -1)]:
            now = player.plan.moves[number].phase if number >= 0 else ""
            if events < self._first or (now == phase and number != 0):
                continue
            for stage, name in (("END", phase), ("START", now)):
                if name:
                    found.append({"stage": stage, "name": name, "device": 0, "time_us": events - self._first})
            phase = now
        return found

    def _event(self, event: Event, time: int, frames: Frames) -> dict[str, Any]:
        address = "device_free" if event.action == "oom" else "addr"
        return {
            "action": event.action,
            address: event.address,
            "size": event.size,
            "stream": self._stream(event.stream),
            "time_us": time,
            "frames": frames,
        }

    def _stream(self, name: str) -> int:
        return self._streams.setdefault(name, len(self._streams))

    def _frames_of(self, number: int, owner: str | None) -> Frames:
        """The frames for a storage at an operator; "" is its workspace, None nothing. The same list for the same ones."""
        found = self._frames.get((number, owner))
        if found is None:
            plan = self._player.plan
            move = plan.moves[number] if number >= 0 else None
            what = f"{plan.storages[owner].kind} {owner}" if owner else "memory" if owner is None else "workspace"
            found = [{"filename": "setup" if move is None else move.op.opcode, "line": 0, "name": what}]
            if move is not None:
                found.append(_user_frame(move.op, move.phase))
            self._frames[number, owner] = found
        return found


def _user_frame(op: Op, phase: str) -> dict[str, Any]:
    """The line of the user's code, with the module as the function's name."""
    file, colon, line = op.source.rpartition(":")
    where = f"{op.path} ({phase})" if op.path else phase
    if not (colon and line.isdigit()):
        return {"filename": op.source or phase, "line": 0, "name": where}
    return {
        "filename": file,
        "line": int(line),
        "name": where,
        "fx_node_op": "call_function",
        "fx_node_name": op.results[0].name if op.results else op.opcode,
        "fx_original_trace": f'File "{file}", line {line}, in {op.path or phase}',
    }


def _settings(settings: Settings, text: str) -> Mapping[str, Any]:
    """As _dump_snapshot names them; no limit to splitting is -1."""
    return {
        VARIABLE: text,
        "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(2**i): number for i, number in enumerate(settings.roundup_power2_divisions)},
    }
