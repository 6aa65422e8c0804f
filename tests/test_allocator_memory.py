"""Out of memory and expandable segments, worked by hand as in test_allocator_sequences.py."""

from __future__ import annotations

import pytest

from memir.allocator.device import FIRST_ADDRESS
from memir.allocator.oom import OutOfMemory, OutOfMemoryError, format_size
from memir.allocator.settings import parse_settings
from memir.allocator.simulator import Allocator
from memir.errors import EXIT_NO
from tests.test_allocator_sequences import M, happened, picture

G = 2**30
EXPANDABLE = parse_settings("expandable_segments:True")


def test_out_of_memory_has_the_figures() -> None:
    a = Allocator(capacity=50 * M, total=60 * M)
    a.malloc(30 * M)
    a.malloc(600)
    with pytest.raises(OutOfMemoryError) as found:
        a.malloc(25 * M)
    # 30 and 2 MiB are reserved; of the 26 MiB that were tried 18 are left
    assert found.value.oom == OutOfMemory(25 * M, 26 * M, 60 * M, 18 * M, 30 * M + 1024, 32 * M)
    assert found.value.exit_code == EXIT_NO
    assert a.events[-1] == ("oom", 18 * M, 25 * M, "")
    assert a.malloc(18 * M)  # what is left can still be had


def test_a_failure_frees_the_cache_first() -> None:
    a = Allocator(capacity=50 * M)
    x = a.malloc(20 * M)
    a.malloc(20 * M)
    a.free(x)
    with pytest.raises(OutOfMemoryError):
        a.malloc(40 * M)
    assert (picture(a), a.num_retries, a.reserved) == ([[20 * M]], 1, 20 * M)


def test_the_message_is_the_one_that_pytorch_prints() -> None:
    """Figures and text as published: torch 2.10 on a T4 of 14.56 GiB, the only process there."""
    oom = OutOfMemory(
        requested=346 * M,
        tried=346 * M,
        total=round(14.56 * G),
        free=round(343.81 * M),
        allocated=round(12.84 * G),
        reserved=round(12.84 * G) + round(1.26 * G),
    )
    assert oom.message == (
        "CUDA out of memory. Tried to allocate 346.00 MiB. GPU 0 has a total capacity of 14.56 GiB of which 343.81 MiB is "
        "free. Including non-PyTorch memory, this process has 14.22 GiB memory in use. Of the allocated memory 12.84 GiB is "
        "allocated by PyTorch, and 1.26 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
        "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def test_the_message_of_a_fraction_names_what_is_allowed() -> None:
    a = Allocator(parse_settings("per_process_memory_fraction:0.5"), capacity=90 * M, total=100 * M)
    a.malloc(30 * M)
    with pytest.raises(OutOfMemoryError, match=r"40\.00 MiB memory in use\. 50\.00 MiB allowed; Of the allocated memory 30"):
        a.malloc(30 * M)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (M, "1024.00 KiB"),
        (20 * M, "20.00 MiB"),
        (G, "1024.00 MiB"),
        (G + 1, "1.00 GiB"),
        (81559 * M, "79.65 GiB"),
    ],
)
def test_sizes_are_written_as_pytorch_does(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_expandable_segments_grow_by_granules_of_20_mib() -> None:
    a = Allocator(EXPANDABLE)
    a.malloc(3 * M)
    assert picture(a) == [[3 * M, -17 * M]]
    # 17 MiB are free and address space follows: one more granule, and the free piece becomes part of it
    a.malloc(18 * M)
    assert picture(a) == [[3 * M, 18 * M, -19 * M]]
    # any rest of 512 bytes is split off
    a.malloc(19 * M - 512)
    assert picture(a) == [[3 * M, 18 * M, 19 * M - 512, -512]]
    # requests of 10 MiB and more are not rounded to 2 MiB
    a.malloc(33 * M + 5)
    assert picture(a) == [[3 * M, 18 * M, 19 * M - 512, 33 * M + 512, -7 * M]]
    assert (a.allocated, a.reserved) == (73 * M, 80 * M)
    assert happened(a)[:3] == [("segment_map", 0, 20 * M), ("alloc", 0, 3 * M), ("segment_map", 20 * M, 20 * M)]


def test_small_expandable_segments_grow_by_2_mib_and_every_stream_has_its_own() -> None:
    a = Allocator(EXPANDABLE)
    a.malloc(M)
    a.malloc(M + 1)  # a large one: in the other segment
    a.malloc(M)
    a.malloc(600)
    a.malloc(600, "comm")
    small, large, other = picture(a)
    assert small == [M, M, 1024, -(2 * M - 1024)]
    assert large == [M + 512, -(19 * M - 512)]
    assert other == [1024, -(2 * M - 1024)]
    # each segment has address space for 1 1/8 of the device's memory, rounded up to granules
    a = Allocator(EXPANDABLE, capacity=100 * M)
    a.malloc(512)
    a.malloc(2 * M)
    assert [s.address - FIRST_ADDRESS for s in a.snapshot()] == [0, 114 * M]  # 112.5 MiB in granules of 2
    a.malloc(2 * M, "comm")
    assert [s.address - FIRST_ADDRESS for s in a.snapshot()] == [0, 114 * M, (114 + 120) * M]  # in granules of 20


def test_a_hole_is_better_than_the_end_that_could_grow() -> None:
    a = Allocator(EXPANDABLE)
    b = [a.malloc(size * M) for size in (10, 15, 10)]
    a.free(b[1])
    assert picture(a) == [[10 * M, -15 * M, 10 * M, -5 * M]]
    a.malloc(4 * M)
    assert picture(a) == [[10 * M, 4 * M, -11 * M, 10 * M, -5 * M]]
    a.malloc(11 * M + 512)  # fits only at the end
    assert picture(a) == [[10 * M, 4 * M, -11 * M, 10 * M, 11 * M + 512, -(14 * M - 512)]]


def test_the_cache_gives_whole_granules_back() -> None:
    a = Allocator(EXPANDABLE)
    b = [a.malloc(size * M) for size in (3, 50, 3)]
    assert picture(a) == [[3 * M, 50 * M, 3 * M, -4 * M]]
    a.free(b[1])
    a.empty_cache()
    # the free 50 MiB are those from 3 to 53: the granule from 20 to 40 lies wholly in there
    assert picture(a) == [[3 * M, -17 * M], [-13 * M, 3 * M, -4 * M]]
    assert (a.reserved, happened(a)[-1]) == (40 * M, ("segment_unmap", 20 * M, 20 * M))
    # a request that fits the stretch of address space maps the gap again and joins the pieces
    assert a.malloc(45 * M) == b[0] + 3 * M
    assert picture(a) == [[3 * M, 45 * M, -5 * M, 3 * M, -4 * M]]
    assert (a.reserved, happened(a)[-2]) == (60 * M, ("segment_map", 20 * M, 20 * M))


def test_an_empty_expandable_segment_goes_away() -> None:
    a = Allocator(EXPANDABLE)
    x, y = a.malloc(3 * M), a.malloc(512)
    a.free(x)
    a.free(y)
    assert picture(a) == [[-20 * M], [-2 * M]]
    a.empty_cache()
    assert (picture(a), a.reserved) == ([], 0)


def test_expandable_memory_runs_out_by_granules() -> None:
    a = Allocator(EXPANDABLE, capacity=50 * M)
    a.malloc(30 * M)
    assert picture(a) == [[30 * M, -10 * M]]
    # 5 MiB more would do, and 10 are left, but a granule has 20
    with pytest.raises(OutOfMemoryError) as found:
        a.malloc(15 * M)
    oom = found.value.oom
    assert (oom.tried, oom.free, oom.allocated, oom.reserved) == (16 * M, 10 * M, 30 * M, 40 * M)
    a.malloc(10 * M)
    assert picture(a) == [[30 * M, 10 * M]]


def test_expandable_segments_of_other_streams_make_room() -> None:
    a = Allocator(EXPANDABLE, capacity=50 * M)
    a.free(a.malloc(40 * M, "comm"))
    a.malloc(40 * M)
    assert (picture(a), a.num_retries) == ([[40 * M]], 1)
    actions = [event.action for event in a.events]
    assert actions[-3:] == ["segment_unmap", "segment_map", "alloc"]


def test_large_segment_size_is_the_granule() -> None:
    a = Allocator(parse_settings("expandable_segments:True,large_segment_size_mb:12"))
    a.malloc(13 * M)
    assert picture(a) == [[13 * M, -11 * M]]
    a = Allocator(parse_settings("large_segment_size_mb:12"))
    a.malloc(3 * M)
    assert picture(a) == [[3 * M, -9 * M]]
