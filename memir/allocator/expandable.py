"""Expandable segments: c10/cuda/CUDACachingAllocator.cpp, Note [Expandable Segments] and the functions named below."""

from __future__ import annotations

from memir.allocator.blocks import Block, Pool, merge
from memir.allocator.device import ExpandableSegment
from memir.allocator.sizes import SMALL_SEGMENT
from memir.allocator.state import State


def expandable_size(block: Block) -> int:
    """What a free block could become by mapping the address space after it (get_free_block, expandable_size)."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def allocate(state: State, pool: Pool, size: int, stream: str) -> Block | None:
    """A free block of at least `size` bytes, not in the pool any more; None if there is not enough memory.

    try_allocate_expandable_block. What was mapped before memory ran out stays mapped.
    """
    block = _find(state, pool, size, stream)
    if not block.mapped and not map_block(state, pool, block, min(block.size, size)):
        return None
    while block.size < size:
        after = block.next
        assert after is not None, "the address space is larger than the device's memory"
        if not map_block(state, pool, after, min(size - block.size, after.size)):
            return None
        block = after  # which has merged with the one before
    pool.erase(block)
    return block


def _find(state: State, pool: Pool, size: int, stream: str) -> Block:
    """The lowest free stretch of address space, mapped or not, with room for `size`; a new one if there is none.

    find_expandable_block.
    """
    for block in pool.unmapped(stream):
        before = block.previous
        start = before if before is not None and before.is_free else block
        nbytes, at = 0, start
        while nbytes < size and at.is_free:
            nbytes += at.size
            if at.next is None:
                break
            at = at.next
        if nbytes >= size:
            return start
    granule = SMALL_SEGMENT if pool.is_small else state.settings.large_segment_size
    segment = ExpandableSegment(state.device, granule, size)
    found = Block(segment.address, segment.size, stream, pool.is_small, segment)
    found.mapped = False
    pool.insert_unmapped(found)
    return found


def map_block(state: State, pool: Pool, block: Block, size: int) -> bool:
    """Put memory behind the first `size` bytes of an unmapped block; it becomes free. False: out of memory (map_block)."""
    assert block.segment is not None
    address = block.address
    nbytes = block.segment.map(address, size)
    if nbytes == 0:
        return False
    pool.erase_unmapped(block)
    block.mapped = True
    if nbytes < block.size:
        rest = Block(address + nbytes, block.size - nbytes, block.stream, block.is_small, block.segment)
        rest.mapped = False
        rest.link(block, block.next)
        pool.insert_unmapped(rest)
        block.size = nbytes
    merge(block, block.previous, pool)
    merge(block, block.next, pool)
    pool.insert(block)
    state.grow(nbytes)
    state.record("segment_map", address, nbytes, block.stream)
    return True


def unmap_block(state: State, pool: Pool, block: Block) -> None:
    """Give the memory of the whole granules in a free block back to the device (unmap_block, release_expandable_segment)."""
    assert block.segment is not None
    address, nbytes = block.segment.unmap(block.address, block.size)
    if nbytes == 0:
        return
    pool.erase(block)
    before, after = address - block.address, block.address + block.size - (address + nbytes)
    if before:
        rest = Block(block.address, before, block.stream, block.is_small, block.segment)
        rest.link(block.previous, block)
        pool.insert(rest)
    if after:
        rest = Block(address + nbytes, after, block.stream, block.is_small, block.segment)
        rest.link(block, block.next)
        pool.insert(rest)
    block.address, block.size, block.mapped = address, nbytes, False
    merge(block, block.previous, pool)
    merge(block, block.next, pool)
    if block.is_split:  # else the segment is empty, and its address space is given back too
        pool.insert_unmapped(block)
    state.reserved -= nbytes
    state.record("segment_unmap", address, nbytes, block.stream)
