"""The allocator itself: DeviceCachingAllocator of c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.13, function by function.

    allocator = Allocator(parse_settings("expandable_segments:True"), capacity=24 * 2**30)
    address = allocator.malloc(3 * 2**20)
    allocator.free(address)
    allocator.reserved, allocator.peak_reserved, allocator.events, allocator.snapshot()

Left out is what no training step in eager mode does: private pools of CUDA graphs, user pools, other devices, sharing between
processes. Python's order is the order of time here: the GPU is taken to have done what was asked of it, except that a block
used on another stream (`record_stream`) stays pending until `synchronize`, or until memory runs out.
"""

from __future__ import annotations

from collections.abc import Iterable

from memir.allocator import expandable, layout, release
from memir.allocator.blocks import Block, Pool, merge
from memir.allocator.device import Device
from memir.allocator.oom import OutOfMemory, OutOfMemoryError
from memir.allocator.settings import Settings
from memir.allocator.sizes import MIN_BLOCK, SMALL, round_size, segment_size
from memir.allocator.state import Event, Segment, State
from memir.errors import InconclusiveError, UsageError


class Allocator:
    """One device's caching allocator.

    `capacity` is the memory in bytes that the process can get for it (what the driver reports, less context and others); None
    for no limit. `total` is what the driver reports, for the text of an error. With `record` false there is no list of events.
    `addresses` are those of segments, in order, where they are known; otherwise they are made up.
    UsageError for a memory fraction without a capacity; InconclusiveError for another backend than PyTorch's own.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        capacity: int | None = None,
        *,
        total: int | None = None,
        record: bool = True,
        addresses: Iterable[int] = (),
    ) -> None:
        settings = settings or Settings()
        if settings.backend != "native":
            raise InconclusiveError(
                f"backend:{settings.backend} leaves memory to the driver, whose pool is not simulated",
                hint="use  backend:native",
            )
        if capacity is not None and capacity < 0:
            raise UsageError(f"a capacity of {capacity} bytes is not possible")
        self._total = capacity if total is None else total
        fraction = settings.per_process_memory_fraction
        if fraction < 1 and self._total is None:
            raise UsageError("per_process_memory_fraction is a part of the GPU's memory, and no GPU is given")
        # setMemoryFraction: a fraction of 1 is no limit
        allowed = None if fraction >= 1 or self._total is None else int(fraction * self._total)
        self._state = State(settings, Device(capacity, addresses), allowed, record)
        self._sizes: dict[int, int] = {}  # request -> its rounded size
        self._collects = allowed is not None and settings.garbage_collection_threshold > 0

    @property
    def settings(self) -> Settings:
        """What it was made with."""
        return self._state.settings

    @property
    def allocated(self) -> int:
        """Bytes of the blocks that are allocated (torch.cuda.memory_allocated)."""
        return self._state.allocated

    @property
    def requested(self) -> int:
        """The same before rounding; blocks that are pending count too (requested_bytes.all.current)."""
        return self._state.requested

    @property
    def reserved(self) -> int:
        """Bytes taken from the device (torch.cuda.memory_reserved)."""
        return self._state.reserved

    @property
    def peak_allocated(self) -> int:
        """The largest `allocated` so far, or since `reset_peaks` (torch.cuda.max_memory_allocated)."""
        return self._state.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """The largest `reserved` so far, or since `reset_peaks` (torch.cuda.max_memory_reserved)."""
        return self._state.peak_reserved

    @property
    def num_retries(self) -> int:
        """How often all cached memory was freed to try again (num_alloc_retries)."""
        return self._state.num_retries

    @property
    def events(self) -> list[Event]:
        """What happened, in order."""
        return self._state.events

    def reset_peaks(self) -> None:
        """Begin the peaks anew from now (torch.cuda.reset_peak_memory_stats)."""
        self._state.peak_allocated, self._state.peak_reserved = self._state.allocated, self._state.reserved

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Begin with these segments and blocks, as `snapshot` gives them. Expandable segments are a ValueError, for a snapshot
        does not tell their address space."""
        layout.adopt(self._state, segments)

    def malloc(self, nbytes: int, stream: str = "") -> int:
        """The address of a block for `nbytes`; 0, and nothing happens, for 0 (NativeCachingAllocator::allocate).

        OutOfMemoryError where neither the device nor the cache has enough; what was cached has been freed then.
        """
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"a request of {nbytes} bytes")
            return 0
        state = self._state
        size = self._sizes.get(nbytes)
        if size is None:
            size = self._sizes[nbytes] = round_size(nbytes, state.settings)
        pool = state.small if size <= SMALL else state.large
        block = self._find_free(pool, size, stream)
        if block is None:
            block = self._allocate(pool, size, stream)
            if block is None:
                raise self._out_of_memory(nbytes, size, stream)
        block = self._split(pool, block, size)
        block.allocated = True
        block.requested = nbytes
        state.active[block.address] = block
        state.allocated += block.size
        state.requested += nbytes
        if state.allocated > state.peak_allocated:
            state.peak_allocated = state.allocated
        if state.recording:
            state.events.append(Event("alloc", block.address, nbytes, stream))
        return block.address

    def _find_free(self, pool: Pool, size: int, stream: str) -> Block | None:
        """The best fitting free block, taken out of its pool; None if there is none that may be used (get_free_block)."""
        settings = self._state.settings
        if self._collects:
            pool.searches += 1
        if not settings.expandable_segments and settings.max_split_size is None:
            return pool.take_smallest(stream, size)
        fitting = pool.fitting(stream, size)
        found = next(fitting, None)
        if found is None:
            return None
        if settings.expandable_segments:
            # best is what could be expanded to the least
            for other in fitting:
                if expandable.expandable_size(other) >= expandable.expandable_size(found):
                    break
                found = other
        limit = settings.max_split_size
        if limit is not None:
            if size < limit <= found.size:
                return None
            if size >= limit and found.size >= size + settings.max_non_split_rounding_size:
                return None
        pool.erase(found)
        return found

    def _allocate(self, pool: Pool, size: int, stream: str) -> Block | None:
        """Memory from the device, at last after all cached memory was given back; None if even so there is not enough.

        The second half of malloc.
        """
        state = self._state
        if self._collects:
            release.garbage_collect(state)
        block = self._new_block(pool, size, stream)
        if block is None and release.release_available(state, pool, size, stream):
            block = self._new_block(pool, size, stream)
        if block is None:
            release.release_cached(state, self.synchronize)
            state.num_retries += 1
            block = self._new_block(pool, size, stream)
        return block

    def _new_block(self, pool: Pool, size: int, stream: str) -> Block | None:
        """A block of a new or an expanded segment, in no pool (alloc_block)."""
        state = self._state
        nbytes = segment_size(size, state.settings)
        if state.allowed is not None and state.reserved + nbytes > state.allowed:
            return None
        if state.settings.expandable_segments:
            return expandable.allocate(state, pool, size, stream)
        address = state.device.malloc(nbytes)
        if address is None:
            return None
        state.grow(nbytes)
        state.record("segment_alloc", address, nbytes, stream)
        return Block(address, nbytes, stream, pool.is_small)

    def _split(self, pool: Pool, block: Block, size: int) -> Block:
        """The front of the block, its rest put back into the pool, where it is worth it (should_split, alloc_found_block)."""
        rest, settings = block.size - size, self._state.settings
        if pool.is_small or settings.expandable_segments:
            worth = rest >= MIN_BLOCK
        else:
            worth = rest > SMALL and (settings.max_split_size is None or size < settings.max_split_size)
        if not worth:
            return block
        front = Block(block.address, size, block.stream, block.is_small, block.segment)
        front.link(block.previous, block)
        block.address += size
        block.size = rest
        pool.insert(block)
        return front

    def _out_of_memory(self, nbytes: int, size: int, stream: str) -> OutOfMemoryError:
        state = self._state
        free = state.device.free
        state.record("oom", free, size, stream)
        total = free + state.reserved if self._total is None else self._total
        tried = segment_size(size, state.settings)
        return OutOfMemoryError(OutOfMemory(nbytes, tried, total, free, state.allocated, state.reserved, state.allowed))

    def free(self, address: int) -> None:
        """Free the block at an address that `malloc` gave; nothing happens for 0. ValueError if none is allocated there."""
        if address == 0:
            return
        state = self._state
        block = state.active.get(address)
        if block is None or not block.allocated:
            raise ValueError(f"no block is allocated at {address:#x}")
        block.allocated = False
        state.allocated -= block.size
        if state.recording:
            state.events.append(Event("free_requested", address, block.requested, block.stream))
        if block.uses:
            block.pending = True
            state.pending.append(block)
        else:
            self._free_block(block)

    def _free_block(self, block: Block) -> None:
        """Put a block into its pool, merged with its free neighbours (free_block)."""
        state = self._state
        if state.recording:
            state.events.append(Event("free_completed", block.address, block.requested, block.stream))
        del state.active[block.address]
        state.requested -= block.requested
        block.requested = 0
        pool = state.small if block.is_small else state.large
        if block.previous is not None:
            merge(block, block.previous, pool)
        if block.next is not None:
            merge(block, block.next, pool)
        pool.insert(block)

    def record_stream(self, address: int, stream: str) -> None:
        """The block is used on another stream too: freed, it stays pending until `synchronize` (recordStream)."""
        block = self._state.active.get(address)
        if block is None or not block.allocated:
            raise ValueError(f"no block is allocated at {address:#x}")
        if stream != block.stream:
            block.uses = (block.uses or set()) | {stream}

    def synchronize(self) -> None:
        """The GPU has done all that was asked of it: pending blocks become free (synchronize_and_free_events)."""
        pending, self._state.pending = self._state.pending, []
        for block in pending:
            block.pending, block.uses = False, None
            self._free_block(block)

    def empty_cache(self) -> None:
        """Give all cached memory back to the device that can be (torch.cuda.empty_cache)."""
        release.release_cached(self._state, self.synchronize)

    def snapshot(self) -> tuple[Segment, ...]:
        """All segments by address and their blocks; of an expandable segment, each mapped stretch is one (snapshot)."""
        return layout.segments(self._state)
