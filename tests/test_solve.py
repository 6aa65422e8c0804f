"""The largest size that fits, against trying every size, and what is said where not the memory ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memir.analysis.inventory import round_size, rounded_peak
from memir.analysis.liveness import timeline
from memir.errors import UsageError
from memir.hardware import Gpu, parse_gpu
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.size import Size, ceil_div, floor_div, max_of, min_of
from memir.sweep.pool import Pool, Step
from memir.sweep.sizes import grows, root
from memir.sweep.solve import largest
from tests.programs import B, S, programs, step


def pool_of(program: Program, general: Program | None = None, max_seq: int | None = None) -> Pool:
    """A pool whose every trace gives the same; the default length is 64 or what a test's domain allows."""
    default = 32 if "S <= 60" in program.domain else 64
    return Pool(lambda b, s: Step(program, general, seq=s or default, name="tiny", max_seq=max_seq), rounds=True, max_traces=3)


def allocated(program: Program, batch: int, seq: int) -> int:
    line, env = timeline(program), {"B": batch, "S": seq}
    nbytes = {storage.name: storage.nbytes.evaluate(env) for storage in program.storages}
    steady = [storage.name for storage in program.storages if storage.live_in and storage.device == "gpu"]
    return rounded_peak(line, nbytes, steady, env, round_size)


growing = st.builds(
    lambda number, size: size * number,
    st.integers(1, 5000),
    st.sampled_from([Size.of(1), B, S, B * S, B * S * S, S * (S + 1), B * S - B, ceil_div(S, 64)]),
)


@given(programs(max_ops=8, size=growing), st.sampled_from("BS"), st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=50)
def test_the_largest_that_fits_is_found_as_if_every_size_was_tried(program: Program, symbol: str, at: int, more: int) -> None:
    program = replace(program, domain=(f"{symbol} <= 60",))
    fitting = [n for n in range(1, 61) if allocated(program, *((n, at) if symbol == "B" else (at, n))) <= more]
    found = largest(pool_of(program), 0, symbol, at, Gpu("", more))
    assert found.value == (fitting[-1] if fitting else None)
    if found.value is not None:
        assert found.numbers is not None
        assert found.numbers.allocated <= more
    if found.over_at is not None:
        assert found.over is not None
        assert found.over_at == (found.value or 0) + 1
        assert found.over.allocated > more


def test_the_answer_names_its_piece_and_place() -> None:
    found = largest(pool_of(step()), 0, "B", 100, Gpu("", 10_000_000))
    assert (found.value, found.over_at, found.limit, found.reason) == (114, 115, "", "")
    assert found.formula == "872*B*S + 3000"
    assert found.over is not None
    assert (found.over.place.phase, found.over.place.source) == ("backward", "model.py:31")


def test_the_allocators_rounding_decides() -> None:
    """At B=114 872*100*B + 3000 bytes are requested; rounded they are more."""
    exact = largest(pool_of(step()), 0, "B", 100, Gpu("", allocated(step(), 114, 100)))
    less = largest(pool_of(step()), 0, "B", 100, Gpu("", allocated(step(), 114, 100) - 1))
    assert (exact.value, less.value) == (114, 113)


def test_a_domain_that_ends_before_the_memory() -> None:
    """The step's own says S <= 1024. A trace beyond gives nothing new here, so that is where the answer ends."""
    found = largest(pool_of(step()), 0, "S", 2, Gpu("", 10**9))
    assert (found.value, found.over, found.limit) == (1024, None, "")
    assert found.reason == "beyond S=1024 nothing is known: the program holds for S <= 1024 only"


def test_a_length_that_the_models_code_refuses() -> None:
    def trace(batch: int, seq: int | None) -> Step:
        if seq == 1025:
            raise UsageError("forward() fails on ids of shape [B, S]", where="model.py:9   assert t <= 1024")
        return Step(step(), seq=seq or 64)

    found = largest(Pool(trace, rounds=True), 0, "S", 2, Gpu("", 10**9))
    assert (found.value, found.over, found.reason) == (1024, None, "")
    assert found.limit == "S=1025 is refused: forward() fails on ids of shape [B, S]; model.py:9   assert t <= 1024"


def test_the_models_own_limit() -> None:
    found = largest(pool_of(step(), max_seq=300), 0, "S", 2, Gpu("", 10**9))
    assert (found.value, found.limit) == (300, "tiny accepts sequences of at most 300 tokens")


def test_nothing_fits() -> None:
    found = largest(pool_of(step()), 0, "B", 100, Gpu("", 20_000))
    assert (found.value, found.over_at, found.numbers) == (None, 1, None)
    assert found.over is not None
    assert found.over.allocated == allocated(step(), 1, 100)


def test_one_sequence_has_a_program_of_its_own() -> None:
    """B=1 takes other operators: where two sequences are too many, the program of one decides."""
    one = parse("memir 1\nprogram @one\ndim B, S\ndomain B == 1\nstorage $x : 600*S input live_in live_out\n")
    more = replace(step(), domain=("B >= 2",))
    assert largest(pool_of(one, more), 0, "B", 100, Gpu("", 10_000_000)).value == 114
    found = largest(pool_of(one, more), 0, "B", 100, Gpu("", 100_000))
    assert (found.value, found.over_at) == (1, 2)
    assert largest(pool_of(one, more), 0, "B", 100, Gpu("", 50_000)).value is None


def test_sizes_that_the_domain_leaves_out_are_not_known() -> None:
    found = largest(pool_of(replace(step(), domain=("S % 64 == 0", "S >= 64"))), 0, "S", 100, Gpu("", 10_000_000))
    assert (found.value, found.over_at) == (64, 128)
    assert found.reason == "S=65 to 127 are not known: the program holds for S % 64 == 0 only"


def test_sizes_that_the_domain_leaves_out_are_traced() -> None:
    def trace(batch: int, seq: int | None) -> Step:
        seq = seq or 64
        base = seq // 64 * 64
        domain = ("S % 64 == 0",) if seq % 64 == 0 else (f"S >= {base + 1}", f"S <= {base + 63}")
        return Step(replace(step(), domain=domain), seq=seq)

    found = largest(Pool(trace, rounds=True), 0, "S", 100, Gpu("", 10_000_000))
    assert (found.value, found.over_at, found.reason) == (114, 115, "")


def test_what_may_shrink_is_not_solved() -> None:
    program = parse("memir 1\nprogram @odd\ndim B, S\nstorage $x : 600*ceil(S/B) input live_in live_out\n")
    found = largest(pool_of(program), 0, "B", 100, Gpu("", 10_000))
    assert found.value is None
    assert found.reason == "a storage of 600*ceil(S/B) bytes is not proven to grow with B"


@given(st.integers(0, 50), st.integers(0, 50), st.integers(-50, 50), st.integers(-100, 5000), st.integers(1, 3))
def test_roots(a: int, b: int, c: int, budget: int, divisor: int) -> None:
    size = S * S * a + S * b + c
    fitting = [n for n in range(201) if size.evaluate({"S": n}) <= budget * divisor]
    assert root(size, divisor, "S", budget, 200) == max(fitting, default=0)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (B * S * 3 + 5, True),
        (S * S - S, True),
        (S * S - S * 10, False),
        (Size.of(1000) - S, False),
        (ceil_div(S + 7, 64) * B, True),
        (floor_div(S * S - S, 2), True),
        (max_of(S, 1000), True),
        (min_of(S, 4096) * S, True),
        (ceil_div(S, B), True),
        (ceil_div(B, S), False),
        (-ceil_div(S, 64), False),
    ],
    ids=str,
)
def test_what_grows_with_s(size: Size, expected: bool) -> None:
    assert grows(size, "S", 1, {"B": 7}) is expected


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GiB", 80 * 2**30), ("23.5gib", 47 * 2**29), ("512 MiB", 2**29), ("1TiB", 2**40), ("0.1KiB", 102)]
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert parse_gpu(text) == Gpu(text, nbytes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("80GB", "10^9 or 2^30 bytes each"),
        ("80", "no unit"),
        ("80Gix", "unknown unit"),
        ("lots", "no amount of memory"),
        ("-3GiB", "no amount of memory"),
        ("0GiB", "no memory at all"),
    ],
)
def test_amounts_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("^", r"\^")):
        parse_gpu(text)
