"""All cuts of a model at once: equal to the pass at each cut, to a real module's parameters, to the reference's figures."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from memir.analysis.cost import Machine, seconds
from memir.analysis.flops import total_flops, work_of
from memir.analysis.peak import peak
from memir.api import TracedProgram, program_of
from memir.cuts import Plan, plan
from memir.cuts.answers import answers
from memir.cuts.cache import boundary, cache_plan
from memir.cuts.pareto import Choice, choices, fastest, pareto
from memir.cuts.plan import flat_sample
from memir.cuts.schedule import autofreeze, parse, run
from memir.errors import UsageError
from memir.ir.domain import Condition
from memir.ir.unroll import unroll
from memir.passes.freeze import Freeze
from memir.recipe import Recipe
from tests.cases.small_gpt import Config, SmallGPT

DEPTH, BATCH, SEQ = 10, 2, 32
MACHINE = Machine("test", (("f32", 1e12),), 1e11)


@pytest.fixture(scope="module")
def step() -> TracedProgram:
    recipe = Recipe(dtype="f32", target="cpu", dropout=False)
    sets = {"depth": DEPTH}
    return program_of("tests/cases/small_gpt.py", recipe, batch=BATCH, seq=SEQ, sets=sets, cache=False)


@pytest.fixture(scope="module")
def cuts(step: TracedProgram) -> Plan:
    return plan(step.program, step.env, MACHINE)


def test_every_cut_is_the_pass_at_that_cut(step: TracedProgram, cuts: Plan) -> None:
    assert [c.cut for c in cuts.cuts] == list(range(DEPTH + 1))
    assert any(len(one.cuts) > 2 for one in cuts.ranges)  # the middle ones come from one program with k
    flat = unroll(step.program, {"L": DEPTH})
    for cut in cuts.cuts:
        nbytes, piece = peak(Freeze(cut=cut.cut).run(flat)).evaluate({"B": BATCH, "S": SEQ})
        assert (cut.peak, cut.phase, cut.op) == (nbytes, piece.place.phase, piece.place.opcode), cut.cut
        assert cut.parameters + cut.gradients + cut.states + cut.activations == cut.peak


def test_what_is_left_to_train_is_what_a_real_module_has(cuts: Plan) -> None:
    model = SmallGPT(Config(depth=DEPTH))
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    head = sum(p.numel() for p in model.head.parameters())
    everything = sum(p.numel() for p in model.parameters())
    assert cuts.cuts[0].num_trainable == everything
    for cut in cuts.cuts[1:]:
        assert cut.num_trainable == sum(layers[cut.cut :]) + head
        assert cut.gradient_bytes == 4 * cut.num_trainable


def test_the_speed_up_has_the_limits_of_the_reference(step: TracedProgram, cuts: Plan) -> None:
    """3L/(3L-2k) without a cache and L/(L-k) with one, the head left out; the first trained layer's input needs no gradient."""
    head = 3 * 2 * BATCH * SEQ * 32 * 64
    layer = sum(w.flops.evaluate(step.env) for w in work_of(flat_sample(step.program)) if ".1." in f".{w.op.path}.") / 3
    first, number = cuts.cuts[0], DEPTH
    for cut in cuts.cuts[1:-1]:
        k = cut.cut
        spared = (first.flops - head) / (3 * number) * 2  # at most the gradients of one layer's first product
        ratio = (first.flops - head) / (cut.flops - head)
        assert 3 * number / (3 * number - 2 * k) <= ratio <= 3 * number * layer / ((3 * number - 2 * k) * layer - spared)
        cached = (first.flops - head) / (cut.cached_flops - head)
        assert number / (number - k) <= cached <= 3 * number * layer / (3 * (number - k) * layer - spared)


def test_operations_are_those_that_pytorch_counts(step: TracedProgram) -> None:
    """torch.utils.flop_counter counts no attention kernel of the CPU: its formulas for CUDA's are taken."""
    model = SmallGPT(Config(depth=DEPTH, dropout=0.0))
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids)[1].backward()
    shape = (BATCH, 4, SEQ, 8)
    attention = DEPTH * (sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape))
    assert total_flops(work_of(step.program), step.env) == counter.get_total_flops() + attention


def test_answers(cuts: Plan) -> None:
    budget = cuts.cuts[4].peak
    found = answers(cuts, budget, "memory", max_seq=64)
    assert found.fits == 4
    assert found.best == DEPTH
    assert found.largest_batch is not None
    assert found.largest_seq is not None
    for cut, most in zip(cuts.cuts, found.largest_batch, strict=True):
        assert cuts.bytes_at(cut.cut, {"B": most}) <= budget if most > 1 else cut.peak >= budget / 2
        assert cuts.bytes_at(cut.cut, {"B": most + 1}) > budget if most else True
    assert max(found.largest_seq) <= 64
    assert answers(cuts, 1, "memory").fits is None
    assert [s.first for s in found.places] == sorted(s.first for s in found.places)


def test_the_boundary_is_one_hidden_state(step: TracedProgram, cuts: Plan) -> None:
    size = boundary(flat_sample(step.program), 2)
    assert size.evaluate(step.env) == 4 * BATCH * SEQ * 32
    found = cache_plan(cuts, "disk", 1e6, 1000, None, step.env, size)
    assert found.dataset_bytes == 1000 * SEQ * 32 * 4
    assert cache_plan(cuts, "disk", None, 1000, 16, step.env, size).dataset_bytes == 1000 * 16 * 32 * 4
    assert found.break_even is None  # a megabyte a second is slower than computing
    assert cache_plan(cuts, "host", 1e15, None, None, step.env, size).break_even == 1


def test_a_schedule_is_the_sum_of_its_phases(cuts: Plan) -> None:
    found = run(cuts, parse("0@0,5@0.5", DEPTH), 4, cached=False)
    first, later = cuts.cuts[0], cuts.cuts[5]
    assert first.seconds is not None
    assert later.seconds is not None
    assert found.time == pytest.approx(0.5 + 0.5 * later.seconds / first.seconds)
    assert found.peak == max(first.peak, *(p.peak for p in found.phases))
    assert found.phases[0].gpus == 4
    assert found.cost_time <= 1 + 1e-9
    assert parse("4@0.25", DEPTH)[0] == (0, 0.0)


def test_cost_gives_gpus_back_where_the_rest_has_room(cuts: Plan) -> None:
    gpus, first, last = 4, cuts.cuts[0], cuts.cuts[-1]
    assert first.seconds is not None
    assert last.seconds is not None
    said = answers(cuts, None, "cost", gpus=gpus)
    assert said.best == min(cuts.cuts, key=lambda c: c.seconds or 0.0).cut
    few = said.kept[last.cut]
    share = last.seconds / first.seconds
    assert (few.gpus, few.hours) == (math.ceil(gpus * share), share)
    assert few.gpus < gpus
    assert few.gpus * few.batch >= gpus * BATCH  # the global batch is there
    assert few.peak == cuts.bytes_at(last.cut, {"B": few.batch}) > last.peak
    tight = answers(cuts, few.peak - 1, "cost", gpus=gpus).kept[last.cut]  # not enough for the larger share
    assert (tight.gpus > few.gpus, tight.peak < few.peak, tight.hours) == (True, True, share)
    found = run(cuts, [(0, 0.0), (last.cut, 0.5)], gpus, cached=False, budget=few.peak - 1)
    assert [p.gpus for p in found.phases] == [gpus, tight.gpus]


def beats(one: Choice, other: Choice) -> bool:
    mine, theirs = (one.cut, one.peak, one.sample), (other.cut, other.peak, other.sample)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@given(
    st.lists(st.builds(Choice, *[st.integers(0, 4)] * 2, st.booleans(), st.booleans(), *[st.integers(1, 6)] * 2), max_size=25)
)
def test_the_pareto_set_is_what_no_other_choice_beats(found: list[Choice]) -> None:
    kept = pareto(found)
    left = {(c.cut, c.peak, c.sample) for c in found if not any(beats(other, c) for other in found)}
    assert [(c.cut, c.peak, c.sample) for c in kept] == sorted(left)
    best = fastest(kept)
    assert [c.sample for c in best] == sorted({c.sample for c in best}, reverse=True)
    if found:
        assert best[-1].sample == min(c.sample for c in found)


def test_choices_are_cuts_at_their_batches(cuts: Plan) -> None:
    budget = 2 * cuts.cuts[0].peak
    found = choices(cuts, budget, checkpointed=False, cached=True)
    assert {c.cut for c in found} == set(range(DEPTH + 1))
    for choice in found:
        assert choice.peak == cuts.bytes_at(choice.cut, {"B": choice.batch}) <= budget
        assert not (choice.cached and not choice.cut)
    asked = [c for c in found if c.batch == BATCH and not c.cached]
    assert [c.sample * BATCH for c in asked] == pytest.approx([c.seconds for c in cuts.cuts])
    assert max(c.batch for c in found if c.cut == 3) == cuts.largest(3, "B", budget)


def test_autofreeze_freezes_half_of_what_is_left_at_each_test() -> None:
    """As the released code does where the front layers' gradients settle first: the first layer at or above the median."""
    found = autofreeze("autofreeze:6", 12, 12)
    assert found == [(0, 0.0), (6, 2 / 6), (9, 3 / 6), (10, 4 / 6), (11, 5 / 6)]
    cut = 0
    for grown, _ in found[1:]:
        changes = [0.1 * layer for layer in range(cut, 12)]
        cut += next(i for i, change in enumerate(changes) if change >= median(changes))
        assert grown == cut
    assert autofreeze("autofreeze", 4, 4)[-1][0] == 3  # one stays
    for text in ("autofreeze:1", "autofreeze:x"):
        with pytest.raises(UsageError, match="autofreeze"):
            autofreeze(text, 12, 12)


@pytest.mark.parametrize("text", ["4@0.5,2@0.7", "x@0", "3", "2@1.5", "99@0", "1@0.3,2@0.3"])
def test_a_schedule_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text, DEPTH)


def test_time_is_what_limits_each_operator(step: TracedProgram) -> None:
    works = work_of(step.program)
    slow_memory = Machine("m", (("f32", 1e30),), 1.0)
    slow_arithmetic = Machine("a", (("f32", 1.0),), 1e30)
    moved = sum(w.times.evaluate(step.env) * w.nbytes.evaluate(step.env) for w in works)
    assert seconds(works, step.env, slow_memory) == pytest.approx(moved)
    assert seconds(works, step.env, slow_arithmetic) == pytest.approx(total_flops(works, step.env))


LOCAL = {"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
GROUPS = LOCAL | {"num_hidden_layers": 16, "head_dim": 8, "sliding_window": 16}
GPT = {"n_embd": 32, "n_head": 2, "vocab_size": 96, "block_size": 64, "n_layer": 12}
DEEP = [
    pytest.param("gemma-2-2b", GROUPS, Recipe(), 2, id="groups of 2"),
    pytest.param("examples/gpt.py", GPT, Recipe(clip=1.0), 1, id="sizes with the depth in them"),
]


@pytest.mark.parametrize(("target", "sets", "recipe", "group"), DEEP)
def test_cuts_of_a_few_layers_are_those_of_all(target: str, sets: dict[str, int], recipe: Recipe, group: int) -> None:
    """Layers that repeat in groups, and sizes with the depth in them: lifted as well, and equal to each cut of all layers."""
    step = program_of(target, recipe, batch=2, seq=32, sets={k: str(v) for k, v in sets.items()}, cache=False)
    lifted = plan(step.program, step.env, MACHINE)
    assert sum(len(one.cuts) > 2 for one in lifted.ranges) == group
    env = {name: value for name, value in step.env.items() if name != "L"}
    flat = unroll(step.program, {"L": step.env["L"]})
    held = 0
    for found, whole in zip(lifted.cuts, plan(flat, env, MACHINE).cuts, strict=True):
        assert found.seconds == pytest.approx(whole.seconds)
        assert found.cached_seconds == pytest.approx(whole.cached_seconds)
        assert replace(found, seconds=0, cached_seconds=0) == replace(whole, seconds=0, cached_seconds=0)
        frozen = Freeze(cut=found.cut).run(step.program)
        if all(c is None or c.holds(step.env) is not False for c in map(Condition.read, frozen.domain)):
            assert peak(frozen).evaluate(step.env)[0] == found.peak
            held += 1
    assert held > len(lifted.cuts) // 2


def test_llama_3_8b_as_the_reference_derives_it() -> None:
    """Parameters, states, gradients and the foreach temporary in units of 1e9 bytes; reference/llmem-autofreeze.md, 3.5."""
    traced = program_of("llama-3-8b", Recipe(), batch=1, seq=16, cache=False)
    found = plan(traced.program, traced.env).cuts
    for cut, expected in ((0, 80.3), (16, 48.2), (24, 34.2)):
        assert (found[cut].phase, found[cut].op) == ("optimizer", "aten._foreach_sqrt")
        resident = found[cut].parameters + found[cut].states + found[cut].gradients + found[cut].gradient_bytes
        assert round(resident / 1e9, 1) == expected
        assert found[cut].peak - resident < 10_000
