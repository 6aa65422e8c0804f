"""Segments and their blocks as plain data, out of the allocator's state and into it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from memir.allocator.blocks import Block
from memir.allocator.state import BlockInfo, Segment, State


def segments(state: State) -> tuple[Segment, ...]:
    """All segments by address; of an expandable segment, each mapped stretch is one (DeviceCachingAllocator::snapshot)."""
    found = []
    for block in [*state.small, *state.large, *state.active.values()]:
        if block.previous is not None and block.previous.mapped:
            continue
        blocks = []
        at: Block | None = block
        while at is not None and at.mapped:
            blocks.append(BlockInfo(at.address, at.size, at.requested, _state_of(at)))
            at = at.next
        size = sum(b.size for b in blocks)
        found.append(Segment(block.address, size, block.stream, block.is_small, block.segment is not None, tuple(blocks)))
    return tuple(sorted(found, key=lambda segment: segment.address))


def _state_of(block: Block) -> Literal["active_allocated", "active_pending_free", "inactive"]:
    if block.allocated:
        return "active_allocated"
    return "active_pending_free" if block.pending else "inactive"


def adopt(state: State, segments: Iterable[Segment]) -> None:
    """Add segments as `segments` gives them. ValueError for an expandable one: its address space is not told."""
    for segment in segments:
        if segment.is_expandable:
            raise ValueError("an expandable segment cannot be adopted")
        pool = state.small if segment.is_small else state.large
        before: Block | None = None
        for info in segment.blocks:
            block = Block(info.address, info.size, segment.stream, segment.is_small)
            block.link(before, None)
            before = block
            if info.state == "inactive":
                pool.insert(block)
                continue
            block.requested = info.requested
            state.active[block.address] = block
            state.requested += info.requested
            if info.state == "active_allocated":
                block.allocated = True
                state.allocated += info.size
            else:
                block.pending = True
                state.pending.append(block)
        state.device.adopt(segment.address, segment.size)
        state.grow(segment.size)
    state.peak_allocated = max(state.peak_allocated, state.allocated)
