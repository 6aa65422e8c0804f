"""The planner's parts: how GPUs are divided, what bounds say, what is written, and that a formula is what its operators say."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping

import pytest
import yaml

from memir.analysis.cost.device import device
from memir.analysis.flops import work_of
from memir.api import program_of
from memir.errors import UsageError
from memir.hardware import find_card
from memir.hardware.links import Cluster, inter_link, intra_link
from memir.ir.core import Kind, Program
from memir.ir.unroll import unroll
from memir.planner.answer import answer, at_margin
from memir.planner.emit import Setting, accelerate, deepspeed, torchrun, torchtitan
from memir.planner.facts import Facts, facts
from memir.planner.methods import COPIES, INNER, Degrees, Method, Run, chosen
from memir.planner.search import Evaluated, Problem, Search
from memir.planner.space import CHECKPOINTS, Candidate, Layout, batches, divisors, layouts
from memir.planner.variant import Variants, exact
from memir.recipe import Recipe

CARD = find_card("a100-80gb")
assert CARD is not None
NODE = Cluster(8, 8, intra_link(CARD), inter_link("ib-400"))
BY_KEY = {method.key: method for method in (*COPIES, *INNER)}
MODEL = "tests/cases/small_gpt.py"


def layout(copies: str, number: int, **inner: int) -> Layout:
    methods = tuple(m for m in INNER if m.axis in inner and m.key != "tp-sp")
    return Layout(Degrees(copies=number, **inner), methods, BY_KEY[copies] if number > 1 else None)


@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 16])
def test_every_layout_uses_all_gpus_once(gpus: int) -> None:
    found = list(layouts(gpus, min(gpus, 8), COPIES, INNER, experts=True))
    assert len(found) == len(set(found))
    for one in found:
        assert one.degrees.ranks == gpus
        assert (one.copies is None) == (one.degrees.copies == 1)
        assert one.degrees.tensor * one.degrees.context <= 8
        assert all(getattr(one.degrees, m.axis) > 1 for m in one.inner)
    assert (found[0].kind == "one gpu") == (gpus == 1)
    assert not any(one.degrees.expert > 1 for one in layouts(gpus, 8, COPIES, INNER, experts=False))


def test_batches_make_the_global_batch() -> None:
    assert batches(layout("fsdp", 8), 64) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert batches(layout("fsdp", 8), 60) == []
    assert batches(layout("fsdp", 8), 4) == []
    assert batches(layout("fsdp", 2, pipeline=4), 16) == [(1, 8), (2, 4)]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_texts_of_passes() -> None:
    candidate = Candidate(layout("zero-2", 4, tensor=2), "full", 2, 4)
    assert candidate.text == "activation-checkpoint,tensor-parallel{degree=2},zero{stage=2 degree=4}"
    assert candidate.layout.name == "zero-2 4 x tp 2"
    sharded = Candidate(layout("fsdp", 4, tensor=2), "none", 2, 4)
    assert sharded.text == "tensor-parallel{degree=2 placed-gradients},fsdp{degree=4}"
    piped = Candidate(layout("fsdp", 2, pipeline=4), "none", 1, 8)
    assert piped.text == "pipeline-parallel{degree=4 microbatches=8},fsdp{degree=2}"
    assert Candidate(layout("ddp", 1), "none", 4, 1).text == ""


FACTS = Facts(32, 14 * 10**9, 2 * 10**9, 14 * 10**9, 2 * 10**9, 32 * 10**9, 0, 8192, 4096, 0)


def exchange(key: str, degrees: Degrees, batch: int = 2, recomputes: bool = False) -> tuple[float, ...]:
    found = BY_KEY[key].communicates(Run(FACTS, degrees, batch, 4096, recomputes, NODE))
    return found.gather_layer, found.reduce_layer, found.inside_forward, found.inside_backward, found.after


def test_what_methods_communicate() -> None:
    eight = Degrees(copies=8)
    gathered, scattered, _, _, after = exchange("fsdp", eight)
    assert gathered == scattered > 0 == after
    reduced = exchange("ddp", eight)[1]
    assert reduced == pytest.approx(2 * scattered, rel=0.05)
    parameters = 32 * gathered * 16 / 14
    assert exchange("zero-1", eight)[4] == pytest.approx(2 * parameters, rel=0.05)
    assert exchange("zero-2", eight)[3:] == pytest.approx((parameters, parameters), rel=0.05)
    small, large = (exchange("tp", Degrees(tensor=8), batch)[2] for batch in (2, 4))
    assert 1.8 * small < large < 2 * small
    assert exchange("tp", Degrees(tensor=8), 2, True)[3] == 2 * exchange("tp", Degrees(tensor=8), 2)[3]
    assert exchange("cp", Degrees(context=8))[2] > 0
    assert exchange("pp", Degrees(pipeline=8))[2] > 0


def test_chosen_methods() -> None:
    copies, inner = chosen("fsdp, tp", COPIES, INNER)
    assert [m.key for m in (*copies, *inner)] == ["fsdp", "tp"]
    with pytest.raises(UsageError, match="no method"):
        chosen("fsdp,magic", COPIES, INNER)


# copies that hold what one GPU holds: their pass binds nothing
class _Alone(Method):
    def text(self, degree: int) -> str:
        return "bind"


ALONE = _Alone("alone", "Alone", "copies", "bind", "", BY_KEY["ddp"].communicates, every=False)


def small_step(batch: int, accumulate: int) -> tuple[Program, Mapping[str, int]]:
    traced = program_of(MODEL, Recipe(accumulate=accumulate), batch=batch, seq=64, sets={"depth": 9}, cache=False)
    return traced.program, traced.dims


@pytest.fixture(scope="module")
def variants() -> Variants:
    return Variants(small_step, lambda _: None)


def problem(variants: Variants, capacity: int, objective: str = "time", global_batch: int = 16) -> Problem:
    program, fixed = variants.step(2, 1)
    env = {name: {"B": 2, "S": 64, **fixed}[name] for name in program.dims}
    found = facts(program, work_of(program), env, 9)
    assert CARD is not None
    return Problem(
        found, device(CARD), Cluster(4, 4, NODE.intra, NODE.inter), 64, global_batch, capacity, tuple(CHECKPOINTS), objective
    )


def test_facts_are_the_program_s_bytes(variants: Variants) -> None:
    found = problem(variants, 1).facts
    program, fixed = variants.step(2, 1)
    flat = unroll(program, fixed)
    env = {"B": 2, "S": 64}
    held = [s for s in flat.storages if s.live_in and s.device == "gpu"]
    sums = {kind: sum(s.nbytes.evaluate(env) for s in held if s.kind == kind) for kind in Kind}
    assert found.parameters == sums[Kind.PARAMETER]
    assert found.states == sums[Kind.OPTIMIZER_STATE]
    assert found.gradients == found.parameters  # all of them are trained, in their own type
    assert found.layer_parameters > found.root_parameters > 0


def test_bounds_hold_and_do_not_change_the_answer(variants: Variants) -> None:
    asked = problem(variants, 2**40)
    search = Search(asked, variants, (ALONE,), ())
    every = [one for pair in search.candidates() if (one := search.evaluate(*pair)) is not None]
    assert len(every) == 9
    for one in every:
        assert one.time is not None
        assert search.bounds.nbytes(one.candidate) <= one.peak
        assert search.bounds.seconds(one.candidate) <= one.time.seconds * (1 + 1e-9)
    for capacity in (2**40, sorted(one.peak for one in every)[4], min(one.peak for one in every)):
        found = Search(problem(variants, capacity), variants, (ALONE,), ()).run()
        fitting = [one for one in every if one.peak <= capacity]
        best = found.best("time")
        assert best is not None
        assert best.tokens == max(one.tokens for one in fitting)
        assert len(found.evaluated) + len(found.pruned) == 9


def test_rows_are_recomputed_and_nothing_fits_has_an_answer(variants: Variants) -> None:
    asked = problem(variants, 2**40)
    said = answer(Search(asked, variants, (ALONE,), ()).run(), asked, variants, 5)
    assert said.winner is not None
    assert said.winner == said.rows[0]
    program, fixed = variants.step(said.winner.candidate.batch, said.winner.candidate.accumulate)
    assert exact(said.winner.candidate.text, program, fixed, said.winner.candidate.batch, 64) == said.winner.peak
    tight = problem(variants, 1000)
    said = answer(Search(tight, variants, (ALONE,), ()).run(), tight, variants, 5)
    assert said.winner is None
    assert said.changes[0].startswith("nearest: ")
    with pytest.raises(UsageError, match="global-batch 3"):
        Search(problem(variants, 1, global_batch=3), variants, (ALONE,), ()).run()


SMALL_LLAMA = {
    "num_hidden_layers": 9, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 320,
}  # fmt: skip


def test_degrees_as_symbols_have_each_degree_s_own_bytes_and_seconds() -> None:
    """One program over degrees gives what the passes with numbers give, at any operator and in every row."""

    def step(batch: int, accumulate: int) -> tuple[Program, Mapping[str, int]]:
        recipe = Recipe(accumulate=accumulate, optimizer_impl="fused")
        traced = program_of("llama-3-8b", recipe, batch=batch, seq=64, sets=SMALL_LLAMA, cache=False)
        return traced.program, traced.dims

    assert CARD is not None
    made = Variants(step, lambda _: None)
    program, fixed = made.step(2, 1)
    texts = [f"fsdp{{degree={n}}}" for n in (2, 5, 64)] + ["data-parallel{degree=3}"]
    texts += ["tensor-parallel{sequence loss placed-gradients degree=2},fsdp{degree=3}"]
    texts += ["activation-checkpoint,tensor-parallel{sequence loss degree=2},data-parallel{degree=2}"]
    for text in texts:
        variant = made.get(text, 2, 1)
        assert variant.failure == ""
        assert {"t", "d"} & variant.fixed.keys() or "parallel" in text
        for batch in (2, 7):
            assert variant.peak(batch, 64)[0] == exact(text, program, fixed, batch, 64), text
        if variant.instead is not None:
            number = variant.instead()
            assert not {"t", "d"} & number.fixed.keys()
            assert variant.parts(3, 64, device(CARD), 9, 1) == number.parts(3, 64, device(CARD), 9, 1)
    refused = made.get("tensor-parallel{degree=3}", 2, 1)
    assert refused.refused
    assert "do not divide by degree 3" in refused.failure


def test_offloading_is_looked_at_where_nothing_else_fits(variants: Variants) -> None:
    copies = (BY_KEY["fsdp"], BY_KEY["fsdp-offload"])
    wide = Search(problem(variants, 2**40), variants, copies, (), offloads=False).run()
    assert not any(one.candidate.layout.offloads for one in (*wide.evaluated, *wide.pruned))
    both = Search(problem(variants, 2**40), variants, copies, ())
    every = [one for pair in both.candidates() if (one := both.evaluate(*pair)) is not None]
    plain = min(one.peak for one in every if not one.candidate.layout.offloads)
    asked = problem(variants, plain - 1)
    search = Search(asked, variants, copies, (), offloads=False)
    found = search.run()
    best = found.best("time")
    assert best is not None
    assert best.candidate.layout.copies is not None
    assert best.candidate.layout.copies.key == "fsdp-offload"
    program, fixed = variants.step(*best.candidate.step)
    assert exact(best.candidate.text, program, fixed, best.candidate.batch, 64) == best.peak
    # a quarter of parameters and both states, rows rounded up; steps are numbers
    assert best.host >= (asked.facts.parameters + asked.facts.states) / 4
    assert best.time is not None
    assert best.time.host > 0 == best.time.optimizer
    for one in every:
        assert one.time is not None
        assert search.bounds.nbytes(one.candidate) <= one.peak
        assert search.bounds.seconds(one.candidate) <= one.time.seconds * (1 + 1e-9)


def test_objectives(variants: Variants) -> None:
    fewest = Search(problem(variants, 2**40, "gpus"), variants, (ALONE,), ()).run().best("gpus")
    cheapest = Search(problem(variants, 2**40, "cost"), variants, (ALONE,), ()).run().best("cost")
    fastest = Search(problem(variants, 2**40, "time"), variants, (ALONE,), ()).run().best("time")
    assert fewest is not None
    assert cheapest is not None
    assert fastest is not None
    assert fewest.num_gpus == cheapest.num_gpus == 1
    assert fastest.num_gpus == 4


def planned(copies: str, number: int, checkpoint: str = "full", **inner: int) -> Evaluated:
    one = layout(copies, number, **inner)
    return Evaluated(Candidate(one, checkpoint, 2, 4), one.degrees.ranks, 1, "backward", True, None, 1.0)


SETTING = Setting("llama-3.1-8b", "bf16", 4096, 64, 8, "--gpu a100-80gb")


def test_torchrun() -> None:
    text = torchrun(planned("fsdp", 4, tensor=2), SETTING)
    compile(text.replace("# torchrun", "#"), "train", "exec")
    for word in (
        "--nproc-per-node 8",
        "fully_shard(layer",
        'init_device_mesh("cuda", (4, 2)',
        "parallelize_module",
        "use_reentrant",
    ):
        assert word in text
    assert "DistributedDataParallel" in torchrun(planned("ddp", 8), SETTING)
    assert "reshard_after_forward=False" in torchrun(planned("fsdp-kept", 8), SETTING)
    assert "--nnodes 2 --nproc-per-node 8" in torchrun(planned("fsdp", 16), SETTING)


def test_accelerate() -> None:
    config = yaml.safe_load(accelerate(planned("fsdp", 8), SETTING))
    assert config["distributed_type"] == "FSDP"
    assert config["num_processes"] == 8
    assert config["fsdp_config"]["fsdp_version"] == 2
    assert config["fsdp_config"]["fsdp_activation_checkpointing"] is True
    both = yaml.safe_load(accelerate(planned("fsdp", 4, tensor=2), SETTING))
    assert both["parallelism_config"]["parallelism_config_tp_size"] == 2
    assert yaml.safe_load(accelerate(planned("ddp", 8), SETTING))["distributed_type"] == "MULTI_GPU"


def test_deepspeed() -> None:
    config = json.loads(deepspeed(planned("zero-2", 8), SETTING))
    assert config["zero_optimization"]["stage"] == 2
    assert config["train_batch_size"] == 8 * config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["bf16"]["enabled"]
    offloaded = json.loads(deepspeed(planned("zero-3-offload", 8), SETTING))["zero_optimization"]
    assert (offloaded["stage"], offloaded["offload_param"]["device"]) == (3, "cpu")
    assert "offload_policy=CPUOffloadPolicy()" in torchrun(planned("fsdp-offload", 8), SETTING)


def test_torchtitan() -> None:
    config = tomllib.loads(torchtitan(planned("fsdp", 4, "selective", tensor=2), SETTING))
    assert config["parallelism"]["data_parallel_shard_degree"] == 4
    assert config["parallelism"]["tensor_parallel_degree"] == 2
    assert config["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    piped = tomllib.loads(torchtitan(planned("fsdp", 2, pipeline=4), SETTING))
    assert piped["training"]["local_batch_size"] == 8
    assert piped["parallelism"]["pipeline_parallel_schedule"] == "1F1B"


@pytest.mark.parametrize(
    ("write", "one"),
    [
        (torchrun, planned("zero-3", 8)),
        (torchrun, planned("fsdp", 2, pipeline=4)),
        (accelerate, planned("zero-1", 8)),
        (accelerate, planned("ddp", 2, pipeline=4)),
        (deepspeed, planned("fsdp", 8)),
        (deepspeed, planned("zero-1", 4, tensor=2)),
        (torchtitan, planned("zero-3", 8)),
    ],
)
def test_what_a_tool_does_not_have_is_refused(write: type[object], one: Evaluated) -> None:
    with pytest.raises(UsageError, match="--emit"):
        write(one, SETTING)  # type: ignore[call-arg]


def test_the_command_that_repeats_a_plan() -> None:
    text = SETTING.command(planned("zero-2", 8))
    assert text == (
        'memir analyze llama-3.1-8b -b 2 -s 4096 --gpu a100-80gb --accumulate 4 --parallel "activation-checkpoint,'
        'zero{stage=2 degree=8}"'
    )


def test_the_margin_is_a_part_of_the_capacity() -> None:
    assert at_margin(1000, 5) == 950
    assert at_margin(1000, 0) == 1000
