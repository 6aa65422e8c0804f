"""The report against numbers worked by hand, and its sums against brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memir.analysis.inventory import collapse, round_size
from memir.analysis.liveness import timeline
from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.recipe import Lora, Recipe
from memir.report import Amount, Spot, build_report, program_report
from tests.programs import points, programs, step

AT = {"B": 2, "S": 500}  # B*S = 1,000


def test_the_report_of_a_step_worked_by_hand() -> None:
    report = build_report(step(), AT, Recipe())
    assert report.peak.requested == 872_000 + 3000
    assert report.spot == Spot("backward", "aten._log_softmax_backward_data", "head", "model.py:31")
    assert report.steady == Amount(11_000, 8192 + 1024 + 2048)
    # ids 8,000, w 1,000, m 2,000, h 64,000, logits and dlogits 400,000 each, every one to a multiple of 512
    assert report.peak.allocated == 8192 + 1024 + 2048 + 64_000 + 2 * 400_384
    assert [(phase.name, phase.requested) for phase in report.phases] == [
        ("forward", 472_000 + 7096),
        ("backward", 875_000),
        ("optimizer", 42_000),
    ]
    assert report.phases[0].samples == (27_000, 91_000, 479_096)
    assert [item for item in report.breakdown if item[1]] == [
        ("activation", 464_000),
        ("temporary", 400_000),
        ("input", 8000),
        ("optimizer_state", 2000),
        ("parameter", 1000),
    ]
    assert [(g.nbytes, g.count, g.kind, g.op, g.module, g.source) for g in report.top][:3] == [
        (400_000, 1, "activation", "aten.mm", "head", "model.py:30"),
        (400_000, 1, "temporary", "aten._log_softmax_backward_data", "head", "model.py:31"),
        (64_000, 1, "activation", "aten.mm", "layers.*.up", "model.py:20"),
    ]
    assert report.unused == ()
    assert report.formulas.peak == "Max(8*B*S + 34000, 872*B*S + 3000)"
    assert report.formulas.domain == ("S <= 1024", "B >= 1")
    assert [(s.words, s.first, s.slope) for s in report.formulas.stretches] == [
        ("S <= 17", 34_016, 16),
        ("S >= 18", 872 * 36 + 3000, 1744),
    ]


def test_the_cpu_rounds_nothing() -> None:
    report = build_report(step(), AT, Recipe(target="cpu"))
    assert report.peak == Amount(875_000, 875_000)
    assert report.steady == Amount(11_000, 11_000)


def test_cuda_rounds_to_512_and_nothing_to_nothing() -> None:
    assert [round_size(n) for n in (0, 1, 512, 513, 1024)] == [0, 512, 512, 1024, 1024]


def test_scratch_counts_as_workspace_at_its_operator() -> None:
    program = step()
    forward = replace(program, phases=program.phases[:1])
    report = build_report(forward, AT)
    assert report.spot.op == "aten.mm"
    assert dict(report.breakdown)["workspace"] == 4096
    assert any((g.kind, g.nbytes, g.source) == ("workspace", 4096, "model.py:30") for g in report.top)


UNUSED = """memir 1
program @unused
storage $r : 1 parameter live_in live_out
storage $old : 2 activation live_in
storage $next : 4 gradient live_out
storage $saved : 8 activation
storage $both : 16 activation
storage $local : 32 temporary
storage $late : 64 activation
storage $used : 128 activation
storage $big : 10000 temporary
phase forward
  %next: u8[4] in $next = test.a()
  %saved: u8[8] in $saved = test.b() saves $saved drops $saved
  %both: u8[16] in $both = test.c() saves $both
  %local: u8[32] in $local = test.d()
  %late: u8[64] in $late = test.e() saves $late
  %used: u8[128] in $used = test.f()
  %big: u8[10000] in $big = test.peak() frees $big
  test.g(%used) drops $late frees $old, $used
  memir.free() frees $saved, $both, $local, $late
"""


def test_what_is_never_used_again_at_the_peak_and_what_holds_it() -> None:
    report = build_report(parse(UNUSED), {})
    assert [(g.nbytes, g.op, g.held_by) for g in report.unused] == [
        (64, "test.e", "a Python variable"),
        (32, "test.d", "a Python variable"),
        (16, "test.c", "a Python variable or autograd"),
        (8, "test.b", "autograd"),
        (4, "test.a", "kept for the next step"),
        (2, "", "a Python variable, from the step before"),
    ]


def test_layers_and_experts_are_taken_together() -> None:
    assert collapse("layers.11.mlp.experts.3.up") == "layers.*.mlp.experts.*.up"
    assert collapse("h.0") == "h.*"
    assert collapse("conv1d.w2") == "conv1d.w2"
    program = parse("""memir 1
program @p
storage $a : 5 activation
storage $b : 7 activation
phase forward
  %a: u8[5] in $a = aten.mm() at @layers.0.up from m.py:1
  %b: u8[7] in $b = aten.mm() frees $a, $b at @layers.1.up from m.py:1
""")
    (group,) = build_report(program, {}).top
    assert (group.nbytes, group.count, group.module) == (12, 2, "layers.*.up")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_parts_sum_to_the_peak(data: st.DataObject) -> None:
    program: Program = data.draw(programs())
    env = data.draw(points(program))
    numbers = timeline(program).evaluate(env)
    report = build_report(program, env)
    assert report.peak.requested == numbers.peak == sum(nbytes for _, nbytes in report.breakdown)
    assert report.peak.allocated >= report.peak.requested >= report.steady.requested == numbers.start
    assert report.peak.requested == max([report.steady.requested, *(phase.requested for phase in report.phases)])
    if len(report.top) < 20:
        assert sum(group.nbytes for group in report.top) == numbers.peak
    assert sum(group.nbytes for group in report.unused) <= numbers.peak
    for phase in report.phases:
        assert max(phase.samples) == phase.requested
    assert sum(stretch.words.startswith("any") for stretch in report.formulas.stretches) in (0, 1)


def test_a_long_phase_keeps_a_few_samples_with_its_peak() -> None:
    ops = "".join(f"  %v{i}: u8[{i}] in $s{i} = test.op() frees $s{i}\n" for i in range(1, 1000))
    storages = "".join(f"storage $s{i} : {i} temporary\n" for i in range(1, 1000))
    (phase,) = build_report(parse(f"memir 1\nprogram @p\n{storages}phase forward\n{ops}"), {}).phases
    assert len(phase.samples) == 60
    assert phase.samples[-1] == phase.requested == 999
    assert list(phase.samples) == sorted(phase.samples)


def test_points_outside_of_the_domain_are_errors() -> None:
    for env, message in (({"B": 1, "S": 2000}, "S <= 1024"), ({"B": 0, "S": 1}, "positive"), ({"S": 1}, "symbol B")):
        with pytest.raises(UsageError, match=message):
            build_report(step(), env)


def test_a_bare_program_is_reported_within_its_limit() -> None:
    assert program_report(step(), 3, 2048).symbols == (("B", 3), ("S", 1024))
    assert program_report(step(), 3, 100).symbols == (("B", 3), ("S", 100))


def test_a_recipe_is_printed_as_it_is() -> None:
    options = dict(build_report(step(), AT, Recipe(lora=Lora(r=8))).recipe)
    assert (options["target"], options["lora"], options["dropout"], options["clip"]) == ("cuda", "r=8,alpha=32", True, 0.0)
    assert build_report(step(), AT, "as it was").recipe == (("recipe", "as it was"),)
    assert build_report(step(), AT, {"target": "cpu", "x": None}).recipe == (("target", "cpu"), ("x", None))
