"""Sizes: what a request is rounded to, and how large a segment is asked of the device for it. All in bytes.

Source: c10/core/AllocatorConfig.h for the constants, round_size, roundup_power2_next_division and get_allocation_size of
c10/cuda/CUDACachingAllocator.cpp for the functions.
"""

from __future__ import annotations

from memir.allocator.settings import MIB, Settings

MIN_BLOCK = 512  # kMinBlockSize
SMALL = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
MIN_LARGE = 10 * MIB  # kMinLargeAlloc: smaller requests of the large pool share segments of large_segment_size
ROUND_LARGE = 2 * MIB  # kRoundLarge


def round_size(nbytes: int, settings: Settings) -> int:
    """The size of the block for a request.

    Before torch 2.8 a size with one division was not rounded at all; with later versions it is rounded to 512 as others are.
    """
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    divisions = settings.divisions(nbytes)
    if divisions > 1 and nbytes > MIN_BLOCK * divisions:
        return round_to_division(nbytes, divisions)
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def round_to_division(nbytes: int, divisions: int) -> int:
    """`nbytes` rounded up to the next of `divisions` equal steps between the powers of two around it."""
    floor = 1 << (nbytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    return floor << 1 if step == 0 else -(-nbytes // step) * step


def segment_size(size: int, settings: Settings) -> int:
    """The size of the segment that is allocated for a block of `size`, where no free block fits."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return settings.large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE
