"""Where a kept program may answer: at its own point always, elsewhere only if a trace there would give the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memir.cache.lookup import Place, _was_special

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
    ("said", "special"),
    [
        (["tracing the step"], False),
        (["tracing again at B=1: other operators might run there"], False),
        (["tracing again at B=1, S=1: other operators might run there"], False),
        (["tracing again at S=768: other operators might run there"], True),
        (["tracing again at B=1, S=768: other operators might run there"], True),
        (["tracing again at B=11: other operators might run there"], True),
    ],
)
def test_a_point_that_widened_the_domain_is_known_from_what_the_tracer_says(said: list[str], special: bool) -> None:
    assert _was_special(said) == special
