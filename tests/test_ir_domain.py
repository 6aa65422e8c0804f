"""Conditions: read, decided, bound; and places in the domain to try."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir.errors import UsageError
from memir.ir.domain import Condition, bind_domain, is_readable, points


@pytest.mark.parametrize(
    ("text", "env", "holds"),
    [
        ("S <= 1024", {"S": 1024}, True),
        ("S < 1024", {"S": 1024}, False),
        ("B*S >= 2*B + 8", {"B": 2, "S": 6}, True),
        ("S != 1", {"S": 1}, False),
        ("S == 4", {"S": 4, "B": 1}, True),
        ("1 > S", {"S": 1}, False),
        ("S % 64 == 0", {"S": 128}, True),
        ("S % 64 == 0", {"S": 130}, False),
        ("Mod(S, 64) == 2", {"S": 130}, True),
        ("t divides B*S", {"t": 6, "B": 2, "S": 9}, True),
        ("t divides B*S", {"t": 4, "B": 2, "S": 9}, False),
        ("S**2 <= 16", {"S": 5}, False),
        ("ceil(S/2) <= 2", {"S": 4}, True),
        ("S % (B - 1) == 0", {"B": 1, "S": 3}, False),
        ("S <= 1024", {"B": 1}, None),
    ],
)
def test_holds(text: str, env: dict[str, int], holds: bool | None) -> None:
    condition = Condition.read(text)
    assert condition is not None
    assert condition.holds(env) is holds
    again = Condition.read(condition.text())
    assert again == condition


@pytest.mark.parametrize("text", ["", "S", "small", "S <= ", "S <= 4 or B <= 2", "Ne(S, 1)", "0 divides S", "S % 2 divides B"])
def test_what_is_not_read_is_not_decided(text: str) -> None:
    assert Condition.read(text) is None
    assert not is_readable(("S <= 4", text))
    assert bind_domain((text,), {"S": 3}, ()) == (text,)


def test_binding() -> None:
    domain = ("S <= 1024", "B*S <= 4096", "B >= 2", "(B + S) % 8 == 0", "t divides B", "B*t^-1 <= 4")
    assert bind_domain(domain, {"B": 4}, ("S", "t")) == (
        "S <= 1024",
        "4*S <= 4096",
        "(S + 4) % 8 == 0",
        "4 % t == 0",
        "4*t^-1 <= 4",
    )
    assert bind_domain(("B*t^-1 <= 4",), {"t": 2}, ("B",)) == ("B*t^-1 <= 4",)
    with pytest.raises(UsageError, match=r"valid only for B >= 2, and was given B=1"):
        bind_domain(domain, {"B": 1}, ("S", "t"))


@given(
    st.lists(
        st.sampled_from(
            ("S <= 1024", "S >= 7", "S % 64 == 0", "B == 3", "B*S <= 900", "t divides B", "S % 24 == 5", "B >= 5000", "odd")
        ),
        max_size=3,
    )
)
def test_points_lie_in_the_domain(domain: list[str]) -> None:
    found = points(("B", "S", "t"), domain)
    assert found == points(("B", "S", "t"), domain)
    for env in found:
        assert env.keys() == {"B", "S", "t"}
        assert all(Condition.read(text).holds(env) for text in domain if text != "odd")  # type: ignore[union-attr]


def test_points_are_found_where_they_are_few() -> None:
    assert points(("S",), ("S % 1000 == 999",)) == [{"S": 999}]
    assert points(("S",), ("S >= 70000",))
    assert points(("S",), ("S == 17",)) == [{"S": 17}]
    assert points((), ()) == [{}]
    assert points(("S",), ("S <= 0",)) == []
