"""What the allocator knows at one moment: pools, figures, and the list of what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from memir.allocator.blocks import Block, Pool
from memir.allocator.device import Device
from memir.allocator.settings import Settings

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]


class Event(NamedTuple):
    """One thing that happened, as PyTorch's TraceEntry has it.

    `size` is what was requested for alloc and free, what the segment has for the others, in bytes. With oom, `address` is the
    device's free memory instead.
    """

    action: Action
    address: int
    size: int
    stream: str


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block in a snapshot; sizes in bytes."""

    address: int
    size: int
    requested: int  # of the last request, 0 for a block that is not active
    state: Literal["active_allocated", "active_pending_free", "inactive"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of memory from the device, tiled by its blocks; of an expandable segment, a stretch that is mapped."""

    address: int
    size: int
    stream: str
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockInfo, ...]


class State:
    """Everything that the allocator's functions read and change."""

    def __init__(self, settings: Settings, device: Device, allowed: int | None, record: bool) -> None:
        self.settings = settings
        self.device = device
        self.allowed = allowed  # allowed_memory_maximum, bytes; None: no limit but the device's
        self.small = Pool(is_small=True)
        self.large = Pool(is_small=False)
        self.active: dict[int, Block] = {}  # allocated or pending, by address
        self.pending: list[Block] = []
        self.events: list[Event] = []
        self.recording = record
        self.allocated = 0  # bytes of allocated blocks, rounded
        self.requested = 0  # the same before rounding; pending blocks count
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.num_retries = 0

    def pool_of(self, block: Block) -> Pool:
        """The pool that a block belongs to."""
        return self.small if block.is_small else self.large

    def record(self, action: Action, address: int, size: int, stream: str) -> None:
        """Add to the list of events (record_trace)."""
        if self.recording:
            self.events.append(Event(action, address, size, stream))

    def grow(self, size: int) -> None:
        """More memory of the device is reserved."""
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
