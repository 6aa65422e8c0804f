"""Whether steps fit a capacity, played through the allocator, by a program small enough to follow by hand."""

from __future__ import annotations

import pytest

from memir.allocator.room import room
from memir.allocator.schedule import Kept
from memir.cuda.verdict import Verdict
from memir.ir.parser import parse
from memir.report import verdict_text

MIB = 2**20
# One weight of 20 MiB, an activation of 40 MiB (B=1), a temporary of 60 MiB while both live: 120 MiB in three segments.
PROGRAM = f"""memir 1
program @small
dim B
storage $w : {20 * MIB} parameter live_in live_out
storage $h : {40 * MIB}*B activation
storage $t : {60 * MIB}*B temporary
value %w: u8[{20 * MIB}] in $w
phase forward
  %h: u8[{40 * MIB}*B] in $h = aten.mm(%w) at @up from model.py:3
  %t: u8[{60 * MIB}*B] in $t = aten.relu(%h) frees $h, $t at @up from model.py:4
"""


@pytest.mark.parametrize(
    ("capacity", "context", "answer"),
    [
        (120, (0, 0), "fits"),
        (125, (0, 5), "fits"),
        (125, (0, 6), "tight"),
        (119, (0, 0), "does not fit"),
        (125, (6, 7), "does not fit"),
    ],
)
def test_the_answer_by_hand(capacity: int, context: tuple[int, int], answer: str) -> None:
    found = room(parse(PROGRAM), {"B": 1}, capacity * MIB, (context[0] * MIB, context[1] * MIB))
    assert (found.answer, found.reserved) == (answer, 120 * MIB)
    assert bool(found.failure) == (answer != "fits")


def test_where_it_fails_is_told_with_pytorchs_message() -> None:
    found = room(parse(PROGRAM), {"B": 1}, 100 * MIB, (MIB, MIB))
    assert found.failure.startswith("in forward at aten.relu (model.py:4): CUDA out of memory. Tried to allocate 60.00 MiB.")
    assert "total capacity of 100.00 MiB of which 39.00 MiB is free" in found.failure


def test_a_workspace_is_played_too() -> None:
    kept = [Kept(8 * MIB, "forward")]
    assert room(parse(PROGRAM), {"B": 1}, 200 * MIB, (0, 0), kept).reserved == 140 * MIB  # a segment of 20 MiB for 1 to 10 MiB
    assert room(parse(PROGRAM), {"B": 1}, 120 * MIB, (0, 0), kept).answer == "does not fit"


def test_cached_blocks_are_given_back_before_it_does_not_fit() -> None:
    """The second step's first request finds the 60 MiB block of the first: B=1 alone would fit 120 MiB, and it does."""
    assert room(parse(PROGRAM), {"B": 1}, 120 * MIB, (0, 0)).answer == "fits"


def test_what_fits_only_after_giving_back_says_so() -> None:
    found = Verdict("24GiB", "", "", 120 * MIB, 100 * MIB, reserved=130 * MIB, decided="fits")
    assert found.after_giving_back
    assert verdict_text(found).endswith("; fits once cached blocks are given back")
    assert not Verdict("24GiB", "", "", 120 * MIB, 100 * MIB, reserved=110 * MIB, decided="fits").after_giving_back
