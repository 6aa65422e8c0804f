"""Where a kept program may answer: at its own point always, elsewhere only if a trace there would give the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memir.cache.lookup import Place, _is_special
from memir.ir.parser import parse
from tests.test_cache_record import SMALL

PLAIN = Place(4, 1024, None, False, (), ("B >= 2", "S >= 2"), None)


@pytest.mark.parametrize(
    ("place", "batch", "seq", "answers"),
    [
        (PLAIN, 4, 1024, True),
        (PLAIN, 64, 1_000_000, True),
        (PLAIN, 1, 1024, False),  # a size of 1 is traced apart
        (PLAIN, 4, 1, False),
        (replace(PLAIN, only_here=True), 4, 1024, True),
        (replace(PLAIN, only_here=True), 4, 1025, False),
        (replace(PLAIN, max_seq=2048), 4, 2048, True),
        (replace(PLAIN, max_seq=2048), 4, 2049, False),  # for the loader to refuse
        (replace(PLAIN, domain=("S <= 2000",)), 4, 2000, True),
        (replace(PLAIN, domain=("S <= 2000",)), 4, 2001, False),
        (replace(PLAIN, domain=("S <= 8192",)), 4, 4096, True),
        (replace(PLAIN, domain=("S <= 8192",)), 4, 4097, False),  # a trace there might look further than 8,192
        (replace(PLAIN, domain=("S <= 8192",)), 9, 1024, True),
        (replace(PLAIN, domain=("S != 768",)), 4, 768, False),
        (replace(PLAIN, domain=("S % 64 == 0",)), 4, 512, True),
        (replace(PLAIN, domain=("S % 64 == 0",)), 4, 511, False),
        (replace(PLAIN, domain=("some other thing",)), 4, 1024, True),
        (replace(PLAIN, domain=("some other thing",)), 4, 1023, False),  # it cannot be decided
        (replace(PLAIN, domain=("S <= q",)), 4, 1023, False),
        (replace(PLAIN, dims=(("L", 32),), domain=("B*L <= 300",)), 9, 1024, True),
        (replace(PLAIN, dims=(("L", 32),), domain=("B*L <= 300",)), 10, 1024, False),
        (replace(PLAIN, batch=1, domain=("B == 1",), general=("B >= 2", "S >= 5")), 1, 5, True),
        (replace(PLAIN, batch=1, domain=("B == 1",), general=("B >= 2", "S >= 5")), 1, 4, False),
    ],
)
def test_where_a_program_answers(place: Place, batch: int, seq: int, answers: bool) -> None:
    assert place.answers(batch, seq, 2048) == ({"B": batch, "S": seq} if answers else None)


@pytest.mark.parametrize(("max_seq", "default"), [(None, 2048), (512, 512), (4096, 2048)])
def test_the_default_length_is_the_models_limit_if_that_is_smaller(max_seq: int | None, default: int) -> None:
    assert replace(PLAIN, max_seq=max_seq).answers(4, None, 2048) == {"B": 4, "S": default}


@pytest.mark.parametrize(
    ("batch", "seq", "special"),
    [
        (2, 100, False),
        (2, 768, True),  # as long as a layer is wide
        (2, 769, True),
        (2, 12, True),  # in a Repeat
        (12, 100, True),
        (8, 96, True),  # B*S
        (2, 1000, True),  # the longest sequence
        (1, 1, False),  # sizes of 1 and 2 are everywhere, and a size of 1 is traced apart anyway
    ],
)
def test_a_point_that_is_a_size_of_the_model_is_special(batch: int, seq: int, special: bool) -> None:
    text = """memir 1
program @a
dim B, S
storage $w : 1536 parameter live_in live_out
storage $h[L] : 24*B*S temporary
value %w: bf16[768, 1] in $w
phase forward
  repeat i < 3
    %h: bf16[B, S, 12] in $h[i] = aten.mm(%w) frees $h[i]
"""
    record = replace(SMALL, program=parse(text), max_seq=1000)
    assert _is_special(record, batch, seq) == special
