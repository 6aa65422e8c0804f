"""PYTORCH_CUDA_ALLOC_CONF: values, errors, and that PyTorch's own parser accepts and refuses the same texts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memir.allocator.settings import MIB, Settings, parse_settings
from memir.allocator.sizes import round_size
from memir.errors import UsageError

SET = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # since torch 2.8


def test_an_empty_text_is_the_defaults() -> None:
    assert parse_settings("") == parse_settings("  ") == Settings()


def test_every_setting_that_matters_is_read() -> None:
    text = (
        "expandable_segments:True,max_split_size_mb:128,max_non_split_rounding_mb:64,large_segment_size_mb:32,"
        "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8,per_process_memory_fraction:0.9,"
        "backend:native,pinned_num_register_threads:8"
    )
    assert parse_settings(text) == Settings(
        expandable_segments=True,
        max_split_size=128 * MIB,
        max_non_split_rounding_size=64 * MIB,
        large_segment_size=32 * MIB,
        # 256 MiB is interval 8; what is below has the first value, what is above 512 MiB the one of >
        roundup_power2_divisions=(1,) * 9 + (2,) + (4,) * 6,
        garbage_collection_threshold=0.8,
        per_process_memory_fraction=0.9,
    )


def test_blanks_and_a_comma_at_the_end_mean_nothing() -> None:
    expected = Settings(max_split_size=128 * MIB, expandable_segments=True)
    assert parse_settings(" max_split_size_mb: 128 , expandable_segments : True, ") == expected


def test_intervals_without_a_value_are_not_rounded() -> None:
    assert parse_settings("roundup_power2_divisions:[4:8,32:2]").roundup_power2_divisions == (
        8, 8, 8, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    assert parse_settings("roundup_power2_divisions:[>:4]").roundup_power2_divisions == (0,) + (4,) * 15
    assert parse_settings("roundup_power2_divisions:16").roundup_power2_divisions == (16,) * 16
    assert parse_settings("roundup_power2_divisions:[1048576:8]").roundup_power2_divisions == (8,) * 16


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("expandable_segment:True", 1, "no setting 'expandable_segment'"),
        ("max_split_size_mb:64,foo:1", 22, "no setting 'foo'"),
        ("max_split_size_mb", 18, "expected ':', not the end"),
        ("max_split_size_mb:", 19, "expected a number of MiB"),
        ("max_split_size_mb=64", 1, "no setting 'max_split_size_mb=64'"),
        ("max_split_size_mb:128abc", 19, "not '128abc'"),
        ("max_split_size_mb:-1", 19, "not '-1'"),
        ("max_split_size_mb:1e3", 19, "not '1e3'"),
        ("max_split_size_mb:99999999999999999999", 19, "not '99999999999999999999'"),
        ("max_split_size_mb:19", 1, "less than a segment"),
        ("max_split_size_mb:30,large_segment_size_mb:40", 1, "less than a segment"),
        ("large_segment_size_mb:10", 23, "more than 10"),
        ("max_non_split_rounding_mb:8", 1, "less than a segment"),
        ("max_split_size_mb:32,max_split_size_mb:64", 22, "given twice"),
        ("max_split_size_mb:32 expandable_segments:True", 19, "not '32expandable_segments'"),
        ("expandable_segments:true", 21, "True or False, not 'true'"),
        ("expandable_segments:True;max_split_size_mb:64", 21, "not 'True;max_split_size_mb'"),
        ("garbage_collection_threshold:1.0", 30, "neither of them, not '1.0'"),
        ("garbage_collection_threshold:nan", 30, "not 'nan'"),
        ("garbage_collection_threshold:much", 30, "not 'much'"),
        ("per_process_memory_fraction:1.5", 29, "from 0 to 1, not '1.5'"),
        ("roundup_power2_divisions:3", 26, "power of two, not 3"),
        ("roundup_power2_divisions:0", 26, "power of two, not 0"),
        ("roundup_power2_divisions:[300:1]", 27, "not '300'"),
        ("roundup_power2_divisions:[256:3]", 31, "power of two, or 0 for no rounding, not 3"),
        ("roundup_power2_divisions:[256:1", 32, "expected ',', not the end"),
        ("roundup_power2_divisions:[256]", 30, "expected ':', not ']'"),
        ("backend:mine", 9, "native or cudaMallocAsync, not 'mine'"),
        ("backend:cudaMallocAsync,expandable_segments:True", 1, "ignores expandable_segments"),
        (",", 1, "expected the name of a setting"),
    ],
)
def test_an_error_says_what_is_wrong_and_where(text: str, column: int, message: str) -> None:
    with pytest.raises(UsageError) as found:
        parse_settings(text)
    assert message in found.value.message
    assert found.value.where == f"PYTORCH_CUDA_ALLOC_CONF:1:{column}\n{text}\n{' ' * (column - 1)}^"


def test_an_unknown_setting_names_what_was_probably_meant() -> None:
    with pytest.raises(UsageError, match="did you mean  max_split_size_mb"):
        parse_settings("max_split_size:64")
    with pytest.raises(UsageError, match="known: expandable_segments, "):
        parse_settings("x:1")


@pytest.mark.parametrize(
    ("text", "requested", "rounded"),
    [
        ("", 0, 512),
        ("", 1, 512),
        ("", 512, 512),
        ("", 513, 1024),
        ("", 1200, 1536),
        # PyTorch's own example: 1200 lies between 1024 and 2048, whose quarters are 1024, 1280, 1536, 1792. But a quarter would
        # be less than a block of 512, so that the setting holds from 4 * 512 bytes on only
        ("roundup_power2_divisions:4", 1200, 1536),
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 1200 * MIB, 1280 * MIB),
        ("roundup_power2_divisions:4", 1024 * MIB, 1024 * MIB),
        ("roundup_power2_divisions:4", 1024 * MIB + 1, 1280 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", 300 * MIB + 1, 300 * MIB + 512),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", 600 * MIB, 768 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", 1100 * MIB, 1280 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", 100 * 1024 * MIB, 112 * 1024 * MIB),
    ],
)
def test_sizes_are_rounded(text: str, requested: int, rounded: int) -> None:
    assert round_size(requested, parse_settings(text)) == rounded


numbers = st.sampled_from((0, 1, 2, 3, 4, 8, 10, 11, 16, 19, 20, 21, 32, 64, 128, 300, 512))
entries = st.tuples(st.one_of(st.just(">"), numbers), numbers).map(lambda pair: f"{pair[0]}:{pair[1]}")
values = {
    "expandable_segments": st.sampled_from(("True", "False", "true", "1", "")),
    "max_split_size_mb": numbers,
    "max_non_split_rounding_mb": numbers,
    "garbage_collection_threshold": st.sampled_from(("0", "0.5", "0.99", "1", "1.5", "nan", "x")),
    "roundup_power2_divisions": st.one_of(numbers, st.lists(entries, max_size=3).map(lambda e: f"[{','.join(e)}]")),
}
settings_texts = st.lists(st.sampled_from(sorted(values)), unique=True, max_size=3).flatmap(
    lambda keys: st.tuples(*(values[key].map(lambda value, key=key: f"{key}:{value}") for key in keys)).map(",".join)
)


@pytest.fixture(scope="module")
def real_settings() -> Iterator[None]:
    """Put PyTorch's settings back to their defaults at the end: they stay in the process."""
    yield
    if SET is not None:
        SET("large_segment_size_mb:20,max_non_split_rounding_mb:20,expandable_segments:False")


@pytest.mark.skipif(SET is None, reason="torch before 2.8 parses the settings in its CUDA build only")
@given(text=settings_texts, segment=st.sampled_from((5, 10, 11, 20, 40)))
def test_pytorch_accepts_and_refuses_the_same(text: str, segment: int, real_settings: None) -> None:
    assert SET is not None
    text = ",".join(filter(None, (f"large_segment_size_mb:{segment}", text)))
    SET("large_segment_size_mb:20,max_non_split_rounding_mb:20")
    try:
        SET(text)
        accepted = True
    except (ValueError, RuntimeError):
        accepted = False
    try:
        parse_settings(text)
    except UsageError:
        assert not accepted
    else:
        assert accepted
