"""The exact peak: envelopes worked by hand, and every claim about random programs against brute force over all points."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memir.analysis.domain import Range, check, domain_text, ranges
from memir.analysis.dominance import Comparer, attained, prune, segments, values
from memir.analysis.liveness import basis_of, timeline
from memir.analysis.peak import Envelope, Front, Peak, coefficients, peak
from memir.analysis.regions import along, maximum, range_text, regions
from memir.errors import UsageError
from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.size import Size, ceil_div, max_of, min_of
from tests.programs import B, S, points, programs, sizes, step


def number(text: str, env: dict[str, int]) -> int:
    """What a formula gives at a point, by sympy."""
    return int(sympy.sympify(text, locals={name: sympy.Integer(value) for name, value in env.items()}))


def holds(text: str, env: dict[str, int]) -> bool:
    return bool(sympy.sympify(text, locals={name: sympy.Integer(value) for name, value in env.items()}))


def storms(*forms: Size, domain: tuple[str, ...] = (), dims: tuple[str, ...] = ("B", "S")) -> Program:
    """A program whose points are these sizes, one after the other."""
    storages = tuple(Storage(f"s{i}", size, Kind.TEMPORARY) for i, size in enumerate(forms))
    ops = tuple(
        Op(f"op{i}", results=(Value(f"v{i}", "u8", (), (), Size.of(0), f"s{i}"),), frees=(f"s{i}",)) for i in range(len(forms))
    )
    return Program("storms", dims, domain, (), storages, (), (Phase("forward", ops),))


def pieces(found: Envelope) -> list[str]:
    return [str(piece.size) for piece in found.pieces]


def test_the_peak_of_a_step_worked_by_hand() -> None:
    found = peak(step())
    assert maximum(found.total) == "Max(8*B*S + 34000, 872*B*S + 3000)"
    low, high = found.total.pieces
    assert (low.place.phase, low.place.index, low.place.opcode) == ("optimizer", 6, "aten._foreach_sqrt")
    assert (high.place.phase, high.place.path, high.place.source) == ("backward", "head", "model.py:31")
    assert found.evaluate({"B": 1, "S": 36}) == (872 * 36 + 3000, high)  # 34,392 against 34,288
    assert found.evaluate({"B": 1, "S": 35}) == (34280, low)
    assert str(found.resident) == "8*B*S + 3000"
    assert {name: maximum(envelope) for name, envelope in found.phases} == {
        "forward": "472*B*S + 7096",
        "backward": "Max(136*B*S + 4000, 872*B*S + 3000)",  # at B*S = 1 the gradient and its operands
        "optimizer": "8*B*S + 34000",
    }


def test_formulas_parse_with_symbols() -> None:
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in "BS"}
    found = peak(step()).total
    parsed = sympy.sympify(maximum(found), locals=symbols)
    assert parsed.subs({symbols["B"]: 2, symbols["S"]: 1000}) == 872 * 2000 + 3000
    assert [sympy.sympify(r.when, locals=symbols).subs({symbols["B"]: 2, symbols["S"]: 10}) for r in regions(found)] == [
        True,
        False,
    ]


def test_borders_of_one_monomial_are_whole_numbers_of_it() -> None:
    low, high = regions(peak(step()).total)
    assert (low.when, low.words) == ("B*S <= 35", "B*S <= 35")
    assert (high.when, high.words) == ("B*S >= 36", "B*S >= 36")


def test_three_regions_over_one_monomial() -> None:
    found = peak(storms(B * S * 9, Size.of(1000), B * S * 2 + 900)).total
    assert [r.words for r in regions(found)] == ["B*S <= 49", "50 <= B*S <= 128", "B*S >= 129"]
    assert [r.when for r in regions(found)] == ["B*S <= 49", "(B*S >= 50) & (B*S <= 128)", "B*S >= 129"]


def test_a_border_that_lesser_terms_hardly_move_is_named_by_its_main_monomial() -> None:
    """The 4-layer Llama-3-8B-wide step of the notes: optimizer against the loss's backward, at B*S = 6,477."""
    found = peak(storms(Size.of(15_385_002_144), B * S * 2_375_204 + S * 512 + 8)).total
    low, high = regions(found)
    assert (low.words, high.words) == ("B*S <= about 6,477", "B*S >= about 6,477")
    assert low.when == "3846250534 >= 593801*B*S + 128*S"
    assert high.when == "593801*B*S + 128*S > 3846250534"
    assert [range_text("S", within, Range()) for within, _ in along(found, "S", {"B": 4})] == ["S <= 1,619", "S >= 1,620"]


def test_a_border_that_lesser_terms_move_has_no_short_words() -> None:
    found = peak(storms(Size.of(1_000_000), B * S * 100 + S * 90)).total
    assert [r.words for r in regions(found)] == ["", ""]


def test_points_that_another_dominates_fall_away() -> None:
    found = peak(storms(B * S * 10, B * S * 10 - S, S * 9, B * S * 10 + 3, B * S * 2 + S * 7)).total
    assert pieces(found) == ["10*B*S + 3"]
    assert found.pieces[0].place.index == 3


def test_a_piece_below_the_maximum_of_two_others_falls_away() -> None:
    """5*B*S + 400 is dominated by neither 10*B*S nor 1,000 but by their maximum: at B*S = 100 they are 1,000 and it is 900."""
    assert pieces(peak(storms(B * S * 10, Size.of(1000), B * S * 5 + 400)).total) == ["1000", "10*B*S"]
    assert len(pieces(peak(storms(B * S * 10, Size.of(1000), B * S * 5 + 600)).total)) == 3


def test_pieces_that_cross_where_their_ends_cross_fall_away() -> None:
    """A backward pass: each layer trades as many bytes of activations for gradients, so only its ends can be the peak."""
    layers = [B * S * (1000 - 40 * k) + S * 8 + 50_000_000 + 2_000_000 * k for k in range(21)]
    assert pieces(peak(storms(*layers)).total) == [str(layers[-1]), str(layers[0])]
    above = layers[10] + 100_000
    assert pieces(peak(storms(*layers, above)).total) == [str(layers[-1]), str(above), str(layers[0])]


def test_bounds_of_the_domain_are_used() -> None:
    grows, constant = B * S * S, Size.of(64 * 64) * B + 100
    assert len(peak(storms(grows, constant)).total.pieces) == 2
    assert pieces(peak(storms(grows, constant, domain=("S <= 64",))).total) == ["4096*B + 100"]
    assert pieces(peak(storms(grows, constant, domain=("65 <= S", "S >= 65"))).total)[-1] == "B*S^2"
    assert pieces(peak(storms(grows, constant, domain=("S >= 70",))).total) == ["B*S^2"]


def test_generators_are_compared_through_their_bounds() -> None:
    padded = ceil_div(S, 64) * 64 * B
    assert pieces(peak(storms(padded, B * S)).total) == [str(padded)]
    assert pieces(peak(storms(padded, B * S + B * 63)).total) == ["B*S + 63*B"]
    assert len(peak(storms(padded, B * S + B * 62)).total.pieces) == 2
    window = min_of(S, 4096) * B
    assert pieces(peak(storms(B * S, window)).total) == ["B*S"]
    assert pieces(peak(storms(window * 2, B * S, domain=("S <= 4096",))).total) == [str(window * 2)]
    assert pieces(peak(storms(max_of(B, S) * 3, B * 2)).total) == [str(max_of(B, S) * 3)]


def test_many_pieces_are_compared_with_the_maximum_of_the_others() -> None:
    """Nine tangents of a circle's arc in S: each is the maximum somewhere, so none can be left out."""
    forms = [B * S * slope + B * (10_000 - 100 * slope * slope) for slope in range(1, 10)] + [S * 7]
    found = peak(storms(*forms)).total
    assert len(found.pieces) > 8
    for env in ({"B": b, "S": s} for b in (1, 7, 300) for s in (1, 250, 301, 900, 1500, 10**6)):
        (mine,) = (region for region in regions(found) if holds(region.when, env))
        assert mine.piece.size.evaluate(env) == found.evaluate(env)[0] == max(form.evaluate(env) for form in forms)


def test_the_asked_point_is_a_witness() -> None:
    found = peak(step(), env={"B": 3, "S": 700})
    assert found.total.pieces[1].witness == (("B", 3), ("S", 700))


def test_the_peak_may_be_before_the_first_operator() -> None:
    program = storms(S)
    first = replace(program, storages=(*program.storages, Storage("old", B * 100, Kind.TEMPORARY, live_in=True)))
    ops = (Op("memir.free", frees=("old",)), *first.phases[0].ops)
    found = peak(replace(first, phases=(Phase("forward", ops),))).total
    assert pieces(found) == ["S", "100*B"]
    assert found.pieces[1].place.index in (-1, 0)
    assert peak(replace(program, phases=())).evaluate({"B": 1, "S": 1})[0] == 0


def test_outside_of_the_domain_there_is_no_number() -> None:
    found = peak(step())
    for env in ({"B": 0, "S": 8}, {"B": 1, "S": 1025}, {"B": -1, "S": 8}):
        with pytest.raises(UsageError, match="valid for"):
            found.evaluate(env)
    with pytest.raises(UsageError, match="symbol S"):
        found.evaluate({"B": 2})


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_envelope_is_the_maximum_over_all_points(data: st.DataObject) -> None:
    program = data.draw(programs())
    env = data.draw(points(program))
    line = timeline(program)
    numbers = line.evaluate(env)
    found = peak(program, line=line)
    assert found.evaluate(env)[0] == numbers.peak
    nbytes, piece = Front(program, line).evaluate(env)
    assert nbytes == numbers.peak == piece.size.evaluate(env)
    assert piece.place.index == (-1 if numbers.start == nbytes else numbers.running.index(nbytes))
    assert found.evaluate(env)[0] >= found.resident.evaluate(env) == numbers.start
    for name, envelope in found.phases:
        mine = [n for n, (phase, _) in zip(numbers.running, program.ops(), strict=True) if phase.name == name]
        assert envelope.evaluate(env)[0] == max(mine)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_formulas_and_conditions_agree_with_the_concrete_peak_by_sympy(data: st.DataObject) -> None:
    program = data.draw(programs(max_ops=8))
    env = data.draw(points(program))
    concrete = timeline(program).evaluate(env).peak
    found = peak(program, env=env).total
    assert number(maximum(found), env) == concrete
    mine = [region for region in regions(found) if holds(region.when, env)]
    assert len(mine) == 1
    assert mine[0].piece.size.evaluate(env) == concrete


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_stretches_along_a_symbol_are_exact(data: st.DataObject) -> None:
    program = data.draw(programs(max_ops=8))
    env = data.draw(points(program))
    found: Peak = peak(program)
    parts = along(found.total, "S", env)
    assume(parts)  # too many turns to list
    allowed = dict(found.total.domain)["S"]
    assert (parts[0][0].low, parts[-1][0].high) == (allowed.low, allowed.high)
    assert all(a.high is not None and a.high + 1 == b.low for (a, _), (b, _) in pairwise(parts))
    for within, piece in parts:
        ends = {within.low, within.high or within.low + 1000, (within.low + (within.high or within.low + 50)) // 2}
        for at in ends:
            assert piece.size.evaluate({**env, "S": at}) == found.evaluate({**env, "S": at})[0]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_witness_is_a_point_where_its_piece_is_the_peak(data: st.DataObject) -> None:
    found = peak(data.draw(programs())).total
    for piece in found.pieces:
        if piece.witness is not None:
            env = dict(piece.witness)
            assert piece.size.evaluate(env) == found.evaluate(env)[0]


def boxes() -> st.SearchStrategy[tuple[tuple[str, Range], ...]]:
    one = st.builds(
        lambda low, width: Range(low, None if width is None else low + width),
        st.integers(1, 300),
        st.one_of(st.none(), st.integers(0, 300)),
    )
    return st.tuples(one, one).map(lambda pair: (("B", pair[0]), ("S", pair[1])))


@settings(deadline=None)
@given(st.lists(sizes(), min_size=2, max_size=6), boxes(), st.data())
def test_greater_coefficients_on_a_box_mean_greater_values(forms: list[Size], box: Any, data: st.DataObject) -> None:
    basis = basis_of(forms)
    vectors = [coefficients(size, basis) for size in forms]
    comparer = Comparer(basis)
    projected = comparer.project(vectors, box)
    env = {name: data.draw(st.integers(r.low, r.high or r.low + 2000)) for name, r in box}
    exact = values(vectors, basis, env)
    for p, a in zip(projected, exact, strict=True):
        for q, b in zip(projected, exact, strict=True):
            if all(x >= y for x, y in zip(p, q, strict=True)):
                assert a >= b
    kept = prune(vectors, comparer, box)
    assert max(exact[i] for i in kept) == max(exact)
    needed = attained(vectors, comparer, box, max_boxes=40)
    assert max(exact[i] for i in needed) == max(exact)


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes(), min_size=1, max_size=5), st.integers(1, 60))
def test_segments_have_the_maximum_of_every_number(forms: list[Size], batch: int) -> None:
    basis = basis_of(forms)
    vectors = [coefficients(size, basis) for size in forms]
    found = segments(vectors, Comparer(basis), "S", Range(1, 200), {"B": batch}, max_ranges=1000)
    assert found is not None
    assert [n for within, _ in found for n in range(within.low, (within.high or 0) + 1)] == list(range(1, 201))
    for within, i in found:
        for at in range(within.low, (within.high or 0) + 1):
            exact = values(vectors, basis, {"B": batch, "S": at})
            assert exact[i] == max(exact)


def test_pieces_that_take_turns_at_every_step_of_a_ceil_are_not_listed() -> None:
    found = peak(storms(ceil_div(S, 64) * 64 * B, B * S + B * 30)).total
    assert along(found, "S", {"B": 1}) == ()
    assert [within for within, _ in along(peak(storms(ceil_div(S, 64) * 64 * B, B * S * 2)).total, "S", {"B": 1})] == [
        Range(1, 32),
        Range(33, None),
    ]


def test_shards_and_unknown_generators_stay_exact() -> None:
    t = Size.of("t")
    shard, whole = B * S * 8 * t**-1, B * S * 2
    found = peak(storms(shard, whole, dims=("B", "S", "t"))).total
    assert len(found.pieces) == 2
    assert found.evaluate({"B": 4, "S": 6, "t": 2})[0] == 96
    assert found.evaluate({"B": 4, "S": 6, "t": 8})[0] == 48
    odd = ceil_div(S, B + 1)
    found = peak(storms(odd * 5, odd * 4, S, dims=("B", "S"))).total
    for env in ({"B": 1, "S": 100}, {"B": 9, "S": 7}, {"B": 1, "S": 1}):
        assert found.evaluate(env)[0] == max(odd.evaluate(env) * 5, env["S"])


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ((), Range()),
        (("S <= 1024",), Range(1, 1024)),
        (("S < 1024", "S >= 2"), Range(2, 1023)),
        (("1024 >= S", "8 < S"), Range(9, 1024)),
        (("2*S <= 2049",), Range(1, 1024)),
        (("S - 1 < 1024", "3 - S <= 0"), Range(3, 1024)),
        (("S == 64",), Range(64, 64)),
        (("S % 64 == 0", "B*S <= 100", "B <= 4", "t divides S", "something else"), Range()),
    ],
)
def test_ranges_are_read_from_conditions(conditions: tuple[str, ...], expected: Range) -> None:
    assert ranges(("S",), conditions) == {"S": expected}


def test_an_empty_domain_and_points_outside_are_errors() -> None:
    with pytest.raises(UsageError, match="no value of S"):
        ranges(("S",), ("S <= 10", "S > 10"))
    program = replace(step(), domain=("S <= 1024", "S % 64 == 0"))
    check({"B": 1, "S": 128}, program)
    for env, message in (
        ({"B": 1, "S": 100}, r"valid only for S % 64 == 0, and was given S=100"),
        ({"B": 1, "S": 2048}, r"valid only for S <= 1024"),
        ({"B": 0, "S": 64}, r"B must be a positive number, not 0"),
        ({"S": 64}, r"no value is given for the symbol B"),
    ):
        with pytest.raises(UsageError, match=message):
            check(env, program)
    assert domain_text(("B", "S"), program.domain) == ("S <= 1024", "S % 64 == 0", "B >= 1")
