"""Sizes: a ring, evaluated exactly, with one form for equal sizes, and text that reads back."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memir.errors import ParseError
from memir.ir.size import ONE, ZERO, Gen, Size, ceil_div, floor_div, max_of, min_of, pow2_of
from memir.ir.sizetext import parse_size
from memir.ir.symbolic import to_sympy
from tests.strategies import SYMBOLS, environments, polynomials, shards, sizes

B, S, T = Size.of("B"), Size.of("S"), Size.of("t")


@given(sizes(), sizes(), sizes())
def test_ring_laws(a: Size, b: Size, c: Size) -> None:
    assert a + b is b + a
    assert a * b is b * a
    assert (a + b) + c is a + (b + c)
    assert (a * b) * c is a * (b * c)
    assert a * (b + c) is a * b + a * c
    assert a + ZERO is a
    assert a * ONE is a
    assert a * ZERO is ZERO
    assert a - a is ZERO
    assert a**2 is a * a
    assert a**0 is ONE


@given(sizes(), sizes(), environments)
def test_evaluation_is_a_homomorphism(a: Size, b: Size, env: dict[str, int]) -> None:
    assert (a + b).evaluate(env) == a.evaluate(env) + b.evaluate(env)
    assert (a * b).evaluate(env) == a.evaluate(env) * b.evaluate(env)
    assert (-a).evaluate(env) == -a.evaluate(env)


@given(sizes(), environments)
def test_evaluating_is_substituting_everything(size: Size, env: dict[str, int]) -> None:
    bound = size.substitute(env)
    assert bound.is_constant
    assert bound.constant == size.evaluate(env)


@given(sizes(), st.dictionaries(st.sampled_from(SYMBOLS), polynomials(lowest=1).map(lambda p: p + 1)), environments)
def test_substitution_commutes_with_evaluation(size: Size, by: dict[str, Size], env: dict[str, int]) -> None:
    inner = env | {symbol: replacement.evaluate(env) for symbol, replacement in by.items()}
    assert size.substitute(by).evaluate(env) == size.evaluate(inner)


@given(shards(), environments, st.integers(1, 4))
def test_shards_are_exact(size: Size, env: dict[str, int], t: int) -> None:
    exact = size.fraction(env | {"t": t})
    if exact.denominator != 1:
        with pytest.raises(ValueError, match="not a whole number"):
            size.evaluate(env | {"t": t})
        with pytest.raises(ValueError, match="does not divide"):
            size.substitute(env | {"t": t})
    else:
        assert size.evaluate(env | {"t": t}) == size.substitute(env | {"t": t}).constant == exact


@given(sizes(), st.one_of(st.integers(-70, 130).map(Size.of), polynomials()), environments)
def test_generators_mean_what_they_say(a: Size, b: Size, env: dict[str, int]) -> None:
    x, y = a.evaluate(env), b.evaluate(env)
    assert max_of(a, b).evaluate(env) == max(x, y)
    assert min_of(a, b).evaluate(env) == min(x, y)
    assume(b is not ZERO and y)
    assert ceil_div(a, b).evaluate(env) == -(-x // y)
    assert floor_div(a, b).evaluate(env) == x // y


@given(sizes(), st.permutations(SYMBOLS))
def test_text_reads_back_in_any_order(size: Size, order: list[str]) -> None:
    assert parse_size(size.text(order)) is size


@given(shards())
def test_text_of_shards_reads_back(size: Size) -> None:
    assert parse_size(str(size)) is size


@given(sizes())
def test_pickling_keeps_identity(size: Size) -> None:
    assert pickle.loads(pickle.dumps(size)) is size


@given(sizes(), environments)
def test_what_is_proven_not_negative_is_not(size: Size, env: dict[str, int]) -> None:
    assume(size.is_nonnegative)
    assert size.evaluate(env) >= 0


@pytest.mark.parametrize("text", ["0", "7", "B - 1", "B*S - B", "B*S - S - B + 1", "ceil(S/64)*B", "4*B*t^-1", "max(S, 4) + B"])
def test_proven_not_negative(text: str) -> None:
    assert parse_size(text).is_nonnegative


@pytest.mark.parametrize("text", ["-1", "B - 2", "B - S", "ceil(S/64) - 2", "floor((B - S)/2)", "B^2 - 3*B + 3"])
def test_not_proven_is_false(text: str) -> None:
    assert not parse_size(text).is_nonnegative


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("S*B*128 + 4", "128*B*S + 4"),
        ("2*(B + S)^2", "2*B^2 + 4*B*S + 2*S^2"),
        ("8*B*S/(4*t)", "2*B*S*t^-1"),
        ("B**2*S", "B^2*S"),
        ("ceil(6*B/4)", "B + ceil(B/2)"),
        ("ceil((B*S + 64*B + 3)/64)", "B + ceil((B*S + 3)/64)"),
        ("floor((S + 63)/64)", "ceil(S/64)"),
        ("ceil((S - 63)/64)", "floor(S/64)"),
        ("ceil(2*B*S/(4*S*t))", "ceil(B/(2*t))"),
        ("ceil(S/2 + 1/2)", "floor(S/2) + 1"),
        ("ceil(B/t)", "ceil(B/t)"),
        ("ceil(2*B/(3*S))", "ceil(2*B/(3*S))"),
        ("max(B, max(S, 4), 3, B)", "max(max(B, S), 4)"),
        ("min(5, 3)", "3"),
        ("floor(-7/2)", "-4"),
        ("ceil(S/(S + 1))", "ceil(S/(S + 1))"),
        ("ceil((S + 1)/(S + 1))", "1"),
        ("0*B", "0"),
        ("-B", "-B"),
        ("B - -1", None),
    ],
)
def test_one_form(text: str, canonical: str | None) -> None:
    if canonical is None:
        with pytest.raises(ParseError):
            parse_size(text)
    else:
        assert str(parse_size(text)) == canonical


def test_equal_sizes_are_one_object() -> None:
    assert ceil_div(S, 128) is floor_div(S + 127, 128) is 1 + floor_div(S - 1, 128)
    assert Size.of(Gen("max", S, B)) is max_of(B, S)
    assert Size.of(3) * B * S is parse_size("S*3*B")


def test_shards_within_generators() -> None:
    half = ceil_div(B * T**-1, 2)
    assert str(half) == "ceil(B/(2*t))"
    assert half.evaluate({"B": 5, "t": 2}) == 2
    assert max_of(B * T**-1, ONE).fraction({"B": 5, "t": 2}) == Fraction(5, 2)
    with pytest.raises(ValueError, match="not a whole number"):
        max_of(B * T**-1, ONE).evaluate({"B": 5, "t": 2})


def test_sums_of_shards_may_be_whole_together() -> None:
    assert (B * T**-1 + T**-1).substitute({"B": 3, "t": 2}) is Size.of(2)


def test_a_size_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        B.terms = ()


def test_division_by_zero_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        ceil_div(B, 0)
    with pytest.raises(ValueError, match="cannot divide"):
        (B**-1).substitute({"B": B + S})
    with pytest.raises(ValueError, match="cannot take the power"):
        (B + S) ** -1
    with pytest.raises(ValueError, match="does not divide"):
        (3 * B).exact_div(2)
    with pytest.raises(KeyError):
        B.evaluate({"S": 1})


def test_the_next_power_of_two() -> None:
    tokens = Size.of("B") * Size.of("S")
    rows = pow2_of(ceil_div(tokens, 3))
    assert str(rows) == "pow2(ceil(B*S/3))"
    assert parse_size(str(rows)) is rows
    assert [pow2_of(number) for number in (-1, 0, 1, 2, 3, 4, 5, 1025)] == [Size.of(n) for n in (1, 1, 1, 2, 4, 4, 8, 2048)]
    for seq in range(1, 200):
        value = rows.evaluate({"B": 2, "S": seq})
        quotient = -(-2 * seq // 3)
        assert quotient <= value < 2 * quotient
        assert value & (value - 1) == 0
        assert rows.substitute({"B": 2, "S": seq}) is Size.of(value)
        assert to_sympy(rows).subs({to_sympy(B): 2, to_sympy(S): seq}) == value
    assert (rows - 1).is_nonnegative
