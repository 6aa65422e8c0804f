"""Memory that goes back to the device: c10/cuda/CUDACachingAllocator.cpp, the functions named below."""

from __future__ import annotations

from collections.abc import Callable

from memir.allocator.blocks import Block, Pool
from memir.allocator.expandable import unmap_block
from memir.allocator.state import State


def release_block(state: State, pool: Pool, block: Block) -> None:
    """Free a segment that is one free block (release_block)."""
    state.record("segment_free", block.address, block.size, block.stream)
    state.device.give_back(block.size)
    state.reserved -= block.size
    pool.erase(block)


def garbage_collect(state: State) -> None:
    """Above the threshold, free unsplit large blocks that were not used for longer than the average of them.

    garbage_collect_cached_blocks; its age is the number of searches of the pool since a block was put there.
    """
    assert state.allowed is not None
    pool = state.large
    target = state.reserved - int(state.settings.garbage_collection_threshold * state.allowed)
    whole = [block for block in pool if not block.is_split]
    if target <= 0 or not whole:
        return
    count, age = len(whole), sum(pool.searches - block.born for block in whole)
    whole = [block for block in whole if block.segment is None]
    reclaimed, freed = 0, True
    while reclaimed < target and freed and count > 0:
        threshold = age / count
        freed = False
        for block in list(whole):
            if pool.searches - block.born >= threshold:
                freed = True
                reclaimed += block.size
                age -= pool.searches - block.born
                count -= 1
                whole.remove(block)
                release_block(state, pool, block)


def release_available(state: State, pool: Pool, size: int, stream: str) -> bool:
    """With a max_split_size: free one oversize block that is large enough for the request, or several; whether that was enough.

    release_available_cached_blocks.
    """
    limit = state.settings.max_split_size
    if limit is None:
        return False
    wanted = max(size, limit)
    first = next(pool.fitting(stream, wanted), None)
    if first is not None and first.segment is None:
        release_block(state, pool, first)
        return True
    released = 0
    for block in pool.largest_first(stream):
        if released >= wanted or block.size < limit:
            break
        if block.segment is None:
            released += block.size
            release_block(state, pool, block)
    return released >= wanted


def release_cached(state: State, complete: Callable[[], None]) -> None:
    """Free all segments that nothing is allocated in, and unmap all free granules; `complete` ends pending frees before.

    release_cached_blocks.
    """
    complete()
    for pool in (state.large, state.small):
        expandable = []
        for block in list(pool):
            if block.segment is not None:
                expandable.append(block)
            elif not block.is_split:
                release_block(state, pool, block)
        for block in expandable:
            unmap_block(state, pool, block)
