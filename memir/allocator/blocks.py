"""Blocks and the two pools of free ones: struct Block, BlockPool and try_merge_blocks of c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from memir.allocator.device import ExpandableSegment

_ADDRESS_BITS = 53  # addresses are smaller than 2**53 (device.py)
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Block:
    """A piece of a segment; those of one segment are linked by address."""

    __slots__ = (
        "address",
        "allocated",
        "born",
        "is_small",
        "mapped",
        "next",
        "pending",
        "previous",
        "requested",
        "segment",
        "size",
        "stream",
        "uses",
    )

    def __init__(self, address: int, size: int, stream: str, is_small: bool, segment: ExpandableSegment | None = None) -> None:
        self.address = address
        self.size = size
        self.stream = stream  # the one it was allocated on: only that one gets it again
        self.is_small = is_small  # which pool it belongs to
        self.segment = segment  # set for a block of an expandable segment
        self.requested = 0  # bytes of the last request, before rounding
        self.allocated = False
        self.mapped = True  # False: address space of an expandable segment without memory behind it
        self.pending = False  # freed, but another stream may still use it
        self.uses: set[str] | None = None  # other streams that use it (recordStream)
        self.previous: Block | None = None
        self.next: Block | None = None
        self.born = 0  # gc_count_base: the pool's searches when it was last put into the pool

    @property
    def is_split(self) -> bool:
        """Whether it is not the whole of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def is_free(self) -> bool:
        """Whether it can be given out, merged or mapped."""
        return not self.allocated and not self.pending

    def link(self, before: Block | None, after: Block | None) -> None:
        """Put it between two neighbours (Block::splice)."""
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self


class Pool:
    """The free blocks of one kind, sorted by stream, size and address, and the unmapped ones, by stream and address.

    A sorted list of integers a stream, size in the high bits and address in the low ones, orders as BlockComparatorSize does.
    """

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.searches = 0  # get_free_blocks_call_count
        self._keys: dict[str, list[int]] = {}
        self._free: dict[int, Block] = {}  # by address
        self._unmapped: dict[str, list[int]] = {}
        self._unmapped_at: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Add a free block (insert_into_blocks)."""
        block.born = self.searches
        keys = self._keys.get(block.stream)
        if keys is None:
            keys = self._keys[block.stream] = []
        insort(keys, block.size << _ADDRESS_BITS | block.address)
        self._free[block.address] = block

    def erase(self, block: Block) -> None:
        """Take a free block out."""
        keys = self._keys[block.stream]
        del keys[bisect_left(keys, block.size << _ADDRESS_BITS | block.address)]
        del self._free[block.address]

    def fitting(self, stream: str, size: int) -> Iterator[Block]:
        """The free blocks of a stream with at least `size`, from the smallest (lower_bound and on)."""
        keys = self._keys.get(stream, ())
        for place in range(bisect_left(keys, size << _ADDRESS_BITS), len(keys)):
            yield self._free[keys[place] & _ADDRESS]

    def take_smallest(self, stream: str, size: int) -> Block | None:
        """Take out the first of `fitting`."""
        keys = self._keys.get(stream)
        if not keys:
            return None
        place = bisect_left(keys, size << _ADDRESS_BITS)
        if place == len(keys):
            return None
        return self._free.pop(keys.pop(place) & _ADDRESS)

    def largest_first(self, stream: str) -> list[Block]:
        """The free blocks of a stream, from the largest."""
        return [self._free[key & _ADDRESS] for key in reversed(self._keys.get(stream, ()))]

    def __iter__(self) -> Iterator[Block]:
        """All free blocks in the pool's order; streams in that of their first block here."""
        for keys in self._keys.values():
            for key in keys:
                yield self._free[key & _ADDRESS]

    def __len__(self) -> int:
        return len(self._free)

    def insert_unmapped(self, block: Block) -> None:
        """Add a piece of address space."""
        insort(self._unmapped.setdefault(block.stream, []), block.address)
        self._unmapped_at[block.address] = block

    def erase_unmapped(self, block: Block) -> None:
        """Take a piece of address space out."""
        addresses = self._unmapped[block.stream]
        del addresses[bisect_left(addresses, block.address)]
        del self._unmapped_at[block.address]

    def unmapped(self, stream: str) -> list[Block]:
        """The pieces of address space of a stream by address."""
        return [self._unmapped_at[address] for address in self._unmapped.get(stream, ())]


def merge(block: Block, neighbour: Block | None, pool: Pool) -> None:
    """Make a free neighbour, mapped or unmapped like it, part of `block`, which is not in the pool (try_merge_blocks)."""
    if neighbour is None or neighbour.allocated or neighbour.pending or neighbour.mapped != block.mapped:
        return
    if neighbour.mapped:
        pool.erase(neighbour)
    else:
        pool.erase_unmapped(neighbour)
    if block.previous is neighbour:
        block.address = neighbour.address
        block.link(neighbour.previous, block.next)
    else:
        block.link(block.previous, neighbour.next)
    block.size += neighbour.size
