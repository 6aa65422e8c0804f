"""Programs whose number of repetitions is a symbol: every answer is the one of the unrolled program."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from memir.analysis.frames import frames_of, played
from memir.analysis.liveness import is_folded, timeline
from memir.analysis.peak import peak
from memir.errors import InconclusiveError
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.unroll import unroll
from memir.recipe import Recipe
from memir.report import build_report
from tests import strategies

LAYERS = """memir 1
program @layers
dim B, L
domain L >= 1
storage $x : 8*B input live_in live_out
storage $w[L] : 100 parameter live_in live_out
storage $h[L] : 64*B activation
storage $t[L] : 7 temporary
value %x: u8[8*B] in $x
value %w[L]: u8[100] in $w[L]
phase forward
  repeat i < L
    %h[i]: u8[64*B] in $h[i] = aten.mm(%x, %w[i]) at @layers.{i} from model.py:1
    %t[i]: u8[7] in $t[i] = aten.sum(%h[i]) frees $t[i] at @layers.{i} from model.py:2
phase backward
  repeat i < L
    memir.free() frees $h[L-1-i]
"""


@given(strategies.repeated_programs())
@settings(max_examples=60, deadline=None)
def test_the_line_over_the_depth_is_that_of_the_unrolled_program(program: Program) -> None:
    if not is_folded(program):
        return
    line = timeline(program)
    symbolic = peak(program, line=line)
    for depth in (1, 2, 3, 6):
        env = dict.fromkeys(program.dims, 3) | {"L": depth}
        flat = timeline(unroll(program, {"L": depth}))
        at = {k: v for k, v in env.items() if k != "L"}
        numbers, folded = flat.evaluate(at), line.evaluate(env)
        assert (folded.start, folded.peak) == (numbers.start, numbers.peak)
        assert symbolic.evaluate(env)[0] == numbers.peak
        frames, _ = frames_of(program)
        running = [n for _, part in played(frames, folded.running, env) for n in part]
        after = [n for _, part in played(frames, folded.after, env) for n in part]
        assert (running, after) == (list(numbers.running), list(numbers.after))


def test_a_report_is_that_of_the_unrolled_program() -> None:
    program = parse(LAYERS)
    folded = build_report(program, {"B": 2, "L": 5}, Recipe())
    flat = build_report(unroll(program, {"L": 5}), {"B": 2}, Recipe())
    assert folded.peak == flat.peak
    assert folded.peak.requested == 16 + 5 * 100 + 5 * 128 + 7
    assert (folded.spot, folded.phases, folded.breakdown) == (flat.spot, flat.phases, flat.breakdown)
    assert [(g.nbytes, g.count, g.kind, g.op) for g in folded.top] == [(g.nbytes, g.count, g.kind, g.op) for g in flat.top]
    assert folded.formulas == flat.formulas
    assert folded.spot.module == "layers.4"
    assert folded.by_depth is not None
    assert folded.by_depth.peak == "64*B*L + 8*B + 100*L + 7"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("aten.sum(%h[i])", "aten.sum(%h[i]) scratch 4*i", "changes from iteration to iteration"),
        ("storage $h[L] : 64*B activation", "storage $h[L] : 64*B*L activation", "size of a family's members depends on L"),
        ("storage $t[L] : 7", "storage $t[B] : 7", "not for B, L"),
    ],
)
def test_what_is_not_affine_is_inconclusive(old: str, new: str, why: str) -> None:
    with pytest.raises(InconclusiveError, match=why):
        timeline(parse(LAYERS.replace(old, new)))


def in_groups(size: int, domain: str) -> Program:
    """The layers in groups of some."""
    count = f"floor(L/{size})"
    text = LAYERS.replace("[L]", f"[{count}]").replace("i < L", f"i < {count}").replace("L-1", f"{count}-1")
    return parse(text.replace("domain L >= 1", domain))


def test_layers_that_repeat_in_groups() -> None:
    """Depths are whole groups apart, however far apart the first ones that are tried."""
    program = in_groups(3, "domain L % 3 == 2\ndomain L >= 7")
    assert frames_of(program)[0].axes == (("L", 8, 3),)
    for depth in (8, 11, 26):
        numbers = timeline(unroll(program, {"L": depth})).evaluate({"B": 2})
        assert peak(program).evaluate({"B": 2, "L": depth})[0] == numbers.peak


def test_a_depth_between_the_groups_is_inconclusive() -> None:
    with pytest.raises(InconclusiveError, match="not affine in L"):
        timeline(in_groups(2, "domain L >= 2"))


def test_what_only_the_first_iteration_allocates_is_inconclusive() -> None:
    text = (
        LAYERS.replace("%t[i]: u8[7] in $t[i]", "%t[i]: u8[7] in $t").replace(" frees $t[i]", "").replace("$t[L] : 7", "$t : 7")
    )
    with pytest.raises(InconclusiveError, match="allocates in the first iteration only"):
        timeline(parse(text))
