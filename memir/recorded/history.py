"""What was allocated and reserved at every event of a recording, reckoned backwards from the segments at its end.

Bytes are as requested, and as the allocator rounds requests up (512 bytes): events do not tell the blocks' sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from memir.errors import UsageError
from memir.recorded.recording import Recording

ROUNDING = 512


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes at one moment."""

    requested: int
    rounded: int
    reserved: int


@dataclass(frozen=True, slots=True)
class History:
    """`after[i]` holds after event i, `start` before the first one."""

    recording: Recording
    start: Figures
    after: tuple[Figures, ...]

    def at(self, event: int) -> Figures:
        """Just before an event."""
        return self.after[event - 1] if event else self.start

    def peak(self, start: int, end: int) -> Figures:
        """The largest of each figure from just before event `start` until just before event `end`."""
        stretch = [self.at(start), *self.after[start:end]]
        return Figures(max(f.requested for f in stretch), max(f.rounded for f in stretch), max(f.reserved for f in stretch))


def history(recording: Recording, where: str) -> History:
    """The figures at every event. UsageError where events and segments contradict each other."""
    active = [block.requested for segment in recording.segments for block in segment.blocks if block.active]
    requested, rounded = sum(active), sum(map(_round, active))
    reserved = sum(segment.size for segment in recording.segments)
    backwards: list[Figures] = []
    for event in reversed(recording.events):
        backwards.append(Figures(requested, rounded, reserved))
        if event.action == "alloc":
            requested, rounded = requested - event.size, rounded - _round(event.size)
        elif event.action == "free_completed":
            requested, rounded = requested + event.size, rounded + _round(event.size)
        elif event.action in ("segment_alloc", "segment_map"):
            reserved -= event.size
        elif event.action in ("segment_free", "segment_unmap"):
            reserved += event.size
        if min(requested, reserved) < 0:
            number = len(recording.events) - len(backwards)
            left = min(requested, reserved)
            raise UsageError(
                f"{where}: the events contradict the segments: before event {number} there would be {left:,} bytes",
                hint="was it put together from two snapshots, or altered?",
            )
    return History(recording, Figures(requested, rounded, reserved), tuple(reversed(backwards)))


def _round(nbytes: int) -> int:
    return -(-nbytes // ROUNDING) * ROUNDING
