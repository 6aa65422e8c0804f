"""The pass tensor-parallel: what it conserves, what it refuses, and layers folded or not."""

from __future__ import annotations

from pathlib import Path

import pytest

import memir
from memir.api import program_of
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Program
from memir.ir.size import Size
from memir.ir.unroll import bind, unroll
from memir.ir.verify import verify
from memir.passes.activation_checkpoint import ActivationCheckpoint
from memir.passes.tensor_parallel import TensorParallel
from memir.recipe import Lora, Recipe

EXAMPLES = Path(__file__).parents[1] / "examples"
AT = {"B": 2, "S": 32}


def _traced(model: str, layers: int, optimizer_impl: str = "foreach", **sets: str) -> tuple[Program, dict[str, int]]:
    name = "n_layers" if model.startswith("llama") else "n_layer"
    recipe = Recipe(target="cpu", dtype="f32", optimizer_impl=optimizer_impl)
    traced = memir.trace(str(EXAMPLES / model), recipe, sets={name: str(layers), **sets}, batch=AT["B"], seq=AT["S"])
    return traced.program, traced.dims


@pytest.fixture(scope="module")
def llama() -> Program:
    return _traced("llama.py:small", 2)[0]


@pytest.fixture(scope="module")
def gpt() -> Program:
    return _traced("gpt.py", 2, n_embd="64", n_head="4", vocab_size="96", block_size="64", dropout="0.1")[0]


def test_degree_1_is_the_identity(llama: Program) -> None:
    assert TensorParallel(degree=1, sequence=True, loss=True).run(llama) is llama


@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"loss": True}, {"sequence": True, "loss": True}])
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_sums_over_ranks_conserve(model: str, options: dict[str, bool], request: pytest.FixtureRequest) -> None:
    """A parameter is divided, or whole on each rank; its states and its gradient are as it is. A table of embeddings alone has
    its gradient whole, as DTensor makes it."""
    whole: Program = request.getfixturevalue(model)
    rank = TensorParallel(degree=4, **options).run(whole)
    verify(rank)
    before = {s.name: s for s in whole.storages}
    now = {s.name: s for s in rank.storages}
    divided = set()
    for name, storage in before.items():
        if storage.kind not in (Kind.PARAMETER, Kind.OPTIMIZER_STATE, Kind.GRADIENT):
            continue
        share = now[name].nbytes
        assert share in (storage.nbytes, storage.nbytes.exact_div(4)), name
        if storage.kind == Kind.PARAMETER and share != storage.nbytes:
            divided.add(name)
        elif storage.kind == Kind.OPTIMIZER_STATE and not name.endswith(".step"):
            assert (share != storage.nbytes) == (storage.of in divided), name
        elif storage.kind == Kind.GRADIENT:
            table = name in ("tokens.weight.grad", "positions.weight.grad") and not (
                model == "gpt" and name.startswith("tokens")
            )
            assert (share != storage.nbytes) == (storage.of in divided and not table), name
    norms = {n for n, s in before.items() if s.kind == Kind.PARAMETER and "norm" in n}
    biases = {n for n, s in before.items() if s.kind == Kind.PARAMETER and n.endswith(("proj.bias", "down.bias"))}
    parameters = {n for n, s in before.items() if s.kind == Kind.PARAMETER}
    assert parameters - divided == norms | biases


def test_folded_layers_are_the_flat_ones() -> None:
    sets = {"hidden_size": "32", "intermediate_size": "64", "num_attention_heads": "4", "num_key_value_heads": "4"}
    sets |= {"head_dim": "8", "vocab_size": "96", "num_hidden_layers": "16"}
    recipe = Recipe(target="cpu", optimizer_impl="foreach")
    traced = program_of("llama-3.1-8b", recipe, sets=sets, batch=2, seq=32, cache=False)
    program, dims = traced.program, traced.dims
    assert dims
    for one in (TensorParallel(2), TensorParallel(4, sequence=True, loss=True)):
        folded = one.run(program)
        verify(folded)
        assert len(folded.phases[0].ops) < 300
        env = {**AT, **dims}
        flat = one.run(unroll(bind(program, dims)))
        assert memir.peak(folded).evaluate(env)[0] == memir.peak(flat).evaluate(AT)[0]


def test_composes_with_checkpointing(llama: Program) -> None:
    both = ActivationCheckpoint().run(TensorParallel(2, sequence=True).run(llama))
    verify(both)
    assert memir.peak(both).evaluate(AT)[0] <= memir.peak(llama).evaluate(AT)[0]


@pytest.mark.parametrize("options", [{}, {"sequence": True, "loss": True}])
def test_symbolic_degree_is_the_numeric_one(llama: Program, options: dict[str, bool]) -> None:
    symbolic = TensorParallel(Size.of("t"), **options).run(llama)
    verify(symbolic)
    assert {"t >= 2", "t divides 4", "t divides 8", "t divides 1024"} <= set(symbolic.domain)
    for degree in (2, 4):
        numeric = TensorParallel(degree, **options).run(llama)
        assert memir.peak(symbolic).evaluate({**AT, "t": degree})[0] == memir.peak(numeric).evaluate(AT)[0]


def test_weights_that_are_not_transposed() -> None:
    """transformers' GPT-2 keeps them as [in, out]: backward takes views of what was saved."""
    sets = {"n_embd": "32", "n_head": "4", "vocab_size": "96", "n_layer": "2", "resid_pdrop": "0.1"}
    traced = memir.trace("gpt2", Recipe(target="cuda", optimizer_impl="foreach"), sets=sets, batch=2, seq=32)
    for options in ({}, {"sequence": True, "loss": True}):
        rank = TensorParallel(2, **options).run(traced.program)
        verify(rank)
        now = {s.name: s.nbytes for s in rank.storages}
        assert now["transformer.h.0.attn.c_attn.weight"] == Size.of(32 * 3 * 32 * 2 // 2)


def test_heads_that_do_not_divide(llama: Program) -> None:
    with pytest.raises(UsageError, match="4 key-value heads do not divide by degree 8"):
        TensorParallel(8).run(llama)


def test_sequence_needs_a_multiple(llama: Program) -> None:
    assert "S % 2 == 0" in TensorParallel(2, sequence=True).run(llama).domain
    with pytest.raises(UsageError, match="33"):
        TensorParallel(2, sequence=True).run(bind(llama, {"S": 33}))


def test_adapters_are_not_followed() -> None:
    recipe = Recipe(target="cpu", dtype="f32", optimizer="none", lora=Lora(r=4, targets=("wq", "wv")))
    program = memir.trace(str(EXAMPLES / "llama.py:small"), recipe, sets={"n_layers": "1"}, batch=2, seq=16).program
    with pytest.raises(InconclusiveError, match="two chains"):
        TensorParallel(2).run(program)


def test_nothing_to_split() -> None:
    with pytest.raises(InconclusiveError, match="nothing to split"):
        TensorParallel(2).run(memir.parse("memir 1\nprogram @x\nphase forward\nphase backward\n"))
