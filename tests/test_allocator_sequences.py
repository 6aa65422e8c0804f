"""Sequences worked by hand from c10/cuda/CUDACachingAllocator.cpp: after each request, every segment and every block.

A segment is written as the sizes of its blocks by address; a free one has a minus. `M` is 1 MiB.
"""

from __future__ import annotations

import pytest

from memir.allocator.device import FIRST_ADDRESS
from memir.allocator.settings import parse_settings
from memir.allocator.simulator import Allocator
from memir.errors import InconclusiveError, UsageError

M = 2**20


def picture(allocator: Allocator) -> list[list[int]]:
    return [
        [block.size if block.state != "inactive" else -block.size for block in segment.blocks]
        for segment in allocator.snapshot()
    ]


def happened(allocator: Allocator) -> list[tuple[str, int, int]]:
    """The events: what, at which offset from the first address, how many bytes."""
    return [(event.action, event.address - FIRST_ADDRESS, event.size) for event in allocator.events]


def test_small_requests_share_segments_of_2_mib() -> None:
    a = Allocator()
    a.malloc(100)
    assert picture(a) == [[512, -2096640]]
    a.malloc(1500)
    assert picture(a) == [[512, 1536, -2095104]]
    a.malloc(M)  # the largest small request
    assert picture(a) == [[512, 1536, M, -1046528]]
    a.malloc(M)  # 1046528 bytes are too few for it
    assert picture(a) == [[512, 1536, M, -1046528], [M, -M]]
    a.malloc(M)  # fits without a rest
    assert picture(a) == [[512, 1536, M, -1046528], [M, M]]
    a.malloc(M + 1)  # is no small request any more: 1 MiB and 512 bytes of a segment of 20 MiB
    assert picture(a) == [[512, 1536, M, -1046528], [M, M], [M + 512, -(19 * M - 512)]]
    assert (a.allocated, a.requested, a.reserved) == (512 + 1536 + 4 * M + 512, 100 + 1500 + 4 * M + 1, 24 * M)


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    a = Allocator()
    first = a.malloc(M)
    a.malloc(M - 512)
    assert picture(a) == [[M, M - 512, -512]]
    a.malloc(1)
    assert picture(a) == [[M, M - 512, 512]]
    a.free(first)
    a.malloc(M - 511)
    assert picture(a) == [[M, M - 512, 512]]  # rounded to 1 MiB


def test_requests_from_1_to_10_mib_share_segments_of_20() -> None:
    a = Allocator()
    a.malloc(3 * M)
    assert picture(a) == [[3 * M, -17 * M]]
    a.malloc(9 * M + M // 2)
    assert picture(a) == [[3 * M, 9 * M + M // 2, -7 * M - M // 2]]
    a.malloc(8 * M)
    assert picture(a) == [[3 * M, 9 * M + M // 2, -7 * M - M // 2], [8 * M, -12 * M]]
    # the best fit is the block of 7.5 MiB; its rest of 0.5 is not more than 1 MiB, so it is not split
    a.malloc(7 * M)
    assert picture(a) == [[3 * M, 9 * M + M // 2, 7 * M + M // 2], [8 * M, -12 * M]]
    assert (a.allocated, a.requested, a.reserved) == (28 * M, 27 * M + M // 2, 40 * M)
    a.malloc(11 * M)  # leaves exactly 1 MiB, which is not split off either
    assert picture(a) == [[3 * M, 9 * M + M // 2, 7 * M + M // 2], [8 * M, 12 * M]]


def test_a_rest_of_more_than_1_mib_is_split_off() -> None:
    a = Allocator()
    a.malloc(8 * M)
    a.malloc(11 * M - 512)
    assert picture(a) == [[8 * M, 11 * M - 512, -(M + 512)]]


def test_requests_from_10_mib_on_are_rounded_up_to_2() -> None:
    a = Allocator()
    a.malloc(10 * M)
    assert picture(a) == [[10 * M]]
    a.malloc(10 * M - 512)  # less than 10 MiB after rounding: a segment of 20
    assert picture(a) == [[10 * M], [10 * M - 512, -(10 * M + 512)]]
    a.malloc(10 * M + 513)  # rounded to 10 MiB and 1024 bytes: 12 MiB, whose rest is more than 1 MiB
    assert picture(a) == [[10 * M], [10 * M - 512, -(10 * M + 512)], [10 * M + 1024, -(2 * M - 1024)]]
    a.malloc(11 * M)  # 12 MiB, whose rest is exactly 1 MiB
    assert picture(a)[3:] == [[12 * M]]
    a.malloc(33 * M + 5)
    assert picture(a)[4:] == [[34 * M]]
    assert a.reserved == (10 + 20 + 12 + 12 + 34) * M


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    a = Allocator()
    sizes = [16, 12, 14, 12]
    addresses = [a.malloc(size * M) for size in sizes]
    for address in addresses:
        a.free(address)
    assert picture(a) == [[-16 * M], [-12 * M], [-14 * M], [-12 * M]]
    assert a.malloc(12 * M) == addresses[1]
    assert a.malloc(12 * M) == addresses[3]
    assert a.malloc(12 * M) == addresses[2]
    assert picture(a) == [[-16 * M], [12 * M], [12 * M, -2 * M], [12 * M]]
    # 2 MiB fit into what is left of the third, and not into the larger one
    assert a.malloc(2 * M) == addresses[2] + 12 * M


def test_a_second_round_of_the_same_requests_can_need_more() -> None:
    """The reason why several steps are played: best fit meets segments in another order than they were made in."""
    a = Allocator()
    rounds = []
    for _ in range(3):
        b = [a.malloc(size * M) for size in (5, 16, 15)]
        rounds.append(picture(a))
        for address in b:
            a.free(address)
    assert rounds[0] == [[5 * M, 15 * M], [16 * M]]
    # now 5 MiB fit best into the segment of 16, and 16 into that of 20
    assert rounds[1] == [[16 * M, -4 * M], [5 * M, -11 * M], [16 * M]]
    # of the two segments of 16 MiB the lower one takes 5, the other one 16, and 15 fit into that of 20: enough from now on
    assert rounds[2] == [[15 * M, -5 * M], [5 * M, -11 * M], [16 * M]]


def test_freed_blocks_merge_with_their_neighbours() -> None:
    a = Allocator()
    b = [a.malloc(4 * M) for _ in range(5)]
    assert picture(a) == [[4 * M] * 5]
    a.free(b[1])
    a.free(b[3])
    assert picture(a) == [[4 * M, -4 * M, 4 * M, -4 * M, 4 * M]]
    a.free(b[2])
    assert picture(a) == [[4 * M, -12 * M, 4 * M]]
    a.free(b[4])
    assert picture(a) == [[4 * M, -16 * M]]
    a.free(b[0])
    assert picture(a) == [[-20 * M]]
    assert a.malloc(20 * M) == b[0]


def test_the_events_of_a_sequence() -> None:
    a = Allocator()
    x = a.malloc(3 * M)
    y = a.malloc(700)
    a.free(x)
    a.malloc(2 * M)
    a.free(y)
    a.empty_cache()  # the segment of 20 MiB is in use
    assert happened(a) == [
        ("segment_alloc", 0, 20 * M),
        ("alloc", 0, 3 * M),
        ("segment_alloc", 20 * M, 2 * M),
        ("alloc", 20 * M, 700),
        ("free_requested", 0, 3 * M),
        ("free_completed", 0, 3 * M),
        ("alloc", 0, 2 * M),
        ("free_requested", 20 * M, 700),
        ("free_completed", 20 * M, 700),
        ("segment_free", 20 * M, 2 * M),
    ]
    assert picture(a) == [[2 * M, -18 * M]]


def test_every_stream_has_its_own_blocks() -> None:
    a = Allocator()
    x = a.malloc(12 * M)
    a.free(x)
    y = a.malloc(12 * M, "comm")
    assert picture(a) == [[-12 * M], [12 * M]]
    a.free(y)
    assert a.malloc(12 * M, "comm") == y
    assert a.malloc(12 * M) == x
    assert [segment.stream for segment in a.snapshot()] == ["", "comm"]


def test_a_block_that_another_stream_uses_is_pending_until_it_is_synchronized() -> None:
    a = Allocator()
    x = a.malloc(12 * M)
    a.record_stream(x, "comm")
    a.free(x)
    assert (a.allocated, a.requested) == (0, 12 * M)
    assert [block.state for segment in a.snapshot() for block in segment.blocks] == ["active_pending_free"]
    y = a.malloc(12 * M)
    assert y != x
    a.synchronize()
    assert picture(a) == [[-12 * M], [12 * M]]
    assert [event.action for event in a.events][-4:] == ["free_requested", "segment_alloc", "alloc", "free_completed"]
    a.record_stream(y, "")  # its own stream needs no event
    a.free(y)
    assert picture(a) == [[-12 * M], [-12 * M]]


def test_a_pending_neighbour_is_not_merged() -> None:
    a = Allocator()
    x, y = a.malloc(4 * M), a.malloc(4 * M)
    a.record_stream(y, "comm")
    a.free(y)
    a.free(x)
    assert picture(a) == [[-4 * M, 4 * M, -12 * M]]
    a.synchronize()
    assert picture(a) == [[-20 * M]]


def test_above_max_split_size_blocks_stay_whole() -> None:
    a = Allocator(parse_settings("max_split_size_mb:20"))
    x = a.malloc(30 * M)
    a.free(x)
    # without the setting it would be split for the request of 12 MiB
    a.malloc(12 * M)
    assert picture(a) == [[-30 * M], [12 * M]]
    # a large request takes an oversize block that is less than 20 MiB larger, whole
    assert a.malloc(22 * M) == x
    assert picture(a) == [[30 * M], [12 * M]]
    assert a.allocated == 42 * M
    a.free(x)
    y = a.malloc(60 * M)
    a.free(y)
    assert picture(a) == [[-30 * M], [12 * M], [-60 * M]]
    a.malloc(30 * M)
    # 60 is not less than 40 + 20
    a.malloc(40 * M)
    assert picture(a) == [[30 * M], [12 * M], [-60 * M], [40 * M]]
    assert a.malloc(40 * M + 512) == y


def test_with_max_split_size_20_a_shared_segment_that_is_free_again_is_oversize() -> None:
    """Its 20 MiB are split for a request of 3 MiB while it is new; once whole it serves no such request."""
    a = Allocator(parse_settings("max_split_size_mb:20"))
    x = a.malloc(3 * M)
    assert picture(a) == [[3 * M, -17 * M]]
    a.free(x)
    a.malloc(3 * M)
    assert picture(a) == [[-20 * M], [3 * M, -17 * M]]


def test_a_rounded_request_takes_a_rounded_block() -> None:
    a = Allocator(parse_settings("roundup_power2_divisions:4"))
    x = a.malloc(4 * M + M // 2)  # quarters between 4 and 8 MiB: 4, 5, 6, 7
    assert picture(a) == [[5 * M, -15 * M]]
    a.free(x)
    assert a.malloc(5 * M) == x
    a.malloc(33 * M)  # between 32 and 64: 40
    assert picture(a) == [[5 * M, -15 * M], [40 * M]]
    a.malloc(700)  # is smaller than 4 blocks of 512
    assert picture(a)[2] == [1024, -(2 * M - 1024)]


def test_garbage_collection_frees_what_is_older_than_the_average() -> None:
    # 90 of 100 MiB are allowed, and above 45 MiB garbage is collected
    a = Allocator(
        parse_settings("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"), capacity=100 * M, total=100 * M
    )
    x = a.malloc(20 * M)  # search 1 of the pool
    a.free(x)  # age counts from 1
    y = a.malloc(30 * M)  # search 2
    a.free(y)  # age counts from 2
    before = len(a.events)
    a.malloc(40 * M)  # search 3: 50 MiB are reserved; ages 2 and 1, on average 1.5: the first goes, and 20 MiB are enough
    assert happened(a)[before:] == [("segment_free", 0, 20 * M), ("segment_alloc", 50 * M, 40 * M), ("alloc", 50 * M, 40 * M)]
    assert picture(a) == [[-30 * M], [40 * M]]
    assert a.num_retries == 0


def test_garbage_collection_goes_on_until_enough_is_free() -> None:
    # 200 MiB are allowed, and above 30 MiB garbage is collected
    settings = parse_settings("garbage_collection_threshold:0.15,per_process_memory_fraction:0.5")
    a = Allocator(settings, capacity=400 * M, total=400 * M)
    x, y, z = (a.malloc(size * M) for size in (20, 24, 28))  # 3 searches; nothing is free that could be collected
    a.free(x)  # age counts from 3
    for _ in range(2):
        a.free(y)
        assert a.malloc(24 * M) == y  # searches 4 and 5
    a.free(y)
    a.free(z)  # both from 5
    before = len(a.events)
    a.malloc(40 * M)
    # search 6: ages 3, 1, 1, on average 1.7. 42 of 72 MiB are too much: the first has 20; then the average is 1
    assert [(e.action, e.size // M) for e in a.events[before:]] == [
        ("segment_free", 20),
        ("segment_free", 24),
        ("segment_free", 28),
        ("segment_alloc", 40),
        ("alloc", 40),
    ]


def test_without_a_fraction_below_1_no_garbage_is_collected() -> None:
    a = Allocator(parse_settings("garbage_collection_threshold:0.1"), capacity=100 * M)
    for size in (20, 30, 40):
        a.free(a.malloc(size * M))
    assert picture(a) == [[-20 * M], [-30 * M], [-40 * M]]


def test_before_memory_runs_out_all_that_is_cached_goes_back() -> None:
    a = Allocator(capacity=50 * M)
    a.malloc(2 * M)  # in a segment of 20, which stays
    x, y = a.malloc(12 * M), a.malloc(500)
    assert picture(a) == [[2 * M, 12 * M, -6 * M], [512, -(2 * M - 512)]]
    a.free(x)
    a.free(y)
    z = a.malloc(20 * M)
    a.free(z)
    assert (picture(a), a.reserved) == ([[2 * M, -18 * M], [-2 * M], [-20 * M]], 42 * M)
    before = len(a.events)
    a.malloc(29 * M)  # 30 MiB: 20 fit nowhere, so both free segments go back, the large pool first
    assert happened(a)[before:] == [
        ("segment_free", 22 * M, 20 * M),
        ("segment_free", 20 * M, 2 * M),
        ("segment_alloc", 42 * M, 30 * M),
        ("alloc", 42 * M, 29 * M),
    ]
    assert (a.num_retries, a.reserved) == (1, 50 * M)
    assert picture(a) == [[2 * M, -18 * M], [30 * M]]  # the rest of 1 MiB is not split off


def test_with_max_split_size_only_as_much_goes_back_as_is_needed() -> None:
    a = Allocator(parse_settings("max_split_size_mb:20"), capacity=130 * M)
    addresses = [a.malloc(size * M) for size in (24, 26, 70)]
    for address in addresses:
        a.free(address)
    assert picture(a) == [[-24 * M], [-26 * M], [-70 * M]]
    a.malloc(48 * M)  # 70 is too large to use (48 + 20); the smallest oversize block of at least 48 MiB goes back
    assert (picture(a), a.num_retries) == ([[-24 * M], [-26 * M], [48 * M]], 0)
    a.malloc(50 * M)  # no single one is as large: the largest go back until 50 MiB are free
    assert (picture(a), a.num_retries) == ([[48 * M], [50 * M]], 0)


def test_pending_blocks_are_waited_for_before_memory_runs_out() -> None:
    a = Allocator(capacity=40 * M)
    x = a.malloc(30 * M)
    a.record_stream(x, "comm")
    a.free(x)
    a.malloc(32 * M)
    assert (picture(a), a.num_retries) == ([[32 * M]], 1)


def test_requests_of_no_bytes_are_no_requests() -> None:
    a = Allocator()
    assert a.malloc(0) == 0
    a.free(0)
    assert (a.events, a.reserved) == ([], 0)


def test_misuse_is_told() -> None:
    a = Allocator()
    x = a.malloc(5)
    a.free(x)
    for wrong in (x, 1):
        with pytest.raises(ValueError, match="no block is allocated at 0x"):
            a.free(wrong)
        with pytest.raises(ValueError, match="no block is allocated at 0x"):
            a.record_stream(wrong, "comm")
    with pytest.raises(ValueError, match="-1 bytes"):
        a.malloc(-1)
    with pytest.raises(InconclusiveError, match="cudaMallocAsync leaves memory to the driver"):
        Allocator(parse_settings("backend:cudaMallocAsync"))
    with pytest.raises(UsageError, match="no GPU is given"):
        Allocator(parse_settings("per_process_memory_fraction:0.5"))
    with pytest.raises(UsageError, match="-5 bytes"):
        Allocator(capacity=-5)


def test_peaks_begin_anew_when_they_are_reset() -> None:
    a = Allocator()
    x = a.malloc(30 * M)
    a.malloc(12 * M)
    a.free(x)
    a.empty_cache()
    assert (a.allocated, a.peak_allocated, a.reserved, a.peak_reserved) == (12 * M, 42 * M, 12 * M, 42 * M)
    a.reset_peaks()
    assert (a.peak_allocated, a.peak_reserved) == (12 * M, 12 * M)
