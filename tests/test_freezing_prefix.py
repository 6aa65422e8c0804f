"""A frozen prefix: what belongs to it is read off a real pass; training it equals requires_grad=False done by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from memir.errors import InconclusiveError, UsageError
from memir.freezing import AutoFreeze, FrozenPrefix
from memir.runtime.freezing.frozen import FrozenModule
from memir.runtime.measure import measure_cpu
from tests.decoders import Decoder, decoder, ids

TINY = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 31}
TINY |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32}
SIZES: dict[str, dict[str, int]] = {
    "llama": {"intermediate_size": 24},
    "mixtral": {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
}


def hugging_face(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TINY, **SIZES.get(kind, {}), **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def frozen(model: nn.Module, cut: int, **options: Any) -> FrozenPrefix:
    prefix = FrozenPrefix(model, **options)
    x = ids()
    prefix.observe(x, labels=x) if hasattr(model, "config") else prefix.observe(x, x)
    prefix.set_cut(cut)
    return prefix


def trainable(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_what_comes_before_the_layers_is_seen_not_guessed() -> None:
    prefix = FrozenPrefix(decoder(dropout=0.1))
    assert prefix.before is None
    prefix.model(ids(), ids())  # the training's own pass does
    assert prefix.before is not None
    assert prefix.before.parameters == ("positions", "tokens.weight")
    assert prefix.before.tied == ()
    assert set(prefix.before.modules) == {"tokens", "dropout"}


@pytest.mark.parametrize(
    ("kind", "parameters", "tied"),
    [
        ("llama", {"model.embed_tokens.weight"}, set()),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}, {"transformer.wte.weight"}),
        (
            "opt",
            {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"},
            {"model.decoder.embed_tokens.weight"},
        ),
        (
            "bloom",
            {"transformer.word_embeddings.weight"}
            | {f"transformer.word_embeddings_layernorm.{name}" for name in ("weight", "bias")},
            {"transformer.word_embeddings.weight"},
        ),
    ],
)
def test_the_embedding_freezes_with_the_first_layer_and_a_tied_one_trains_on(
    kind: str, parameters: set[str], tied: set[str]
) -> None:
    model = hugging_face(kind)
    names = trainable(model)
    prefix = FrozenPrefix(model)
    prefix.observe(ids(), labels=ids())
    told = prefix.set_cut(1)
    assert prefix.before is not None
    assert (set(prefix.before.parameters), set(prefix.before.tied)) == (parameters, tied)
    first = {name for name in names if name.startswith(f"{prefix.paths[0]}.")}
    assert names - trainable(model) == first | (parameters - tied)
    assert all(name in told for name in tied)
    assert ("tied or shared" in told) == bool(tied)
    model.train()
    model(ids(), labels=ids()).loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trainable(model)


def test_layers_that_share_weights_with_later_ones_train_on() -> None:
    model = decoder()
    model.layers[3].mlp = model.layers[0].mlp
    told = frozen(model, 0).set_cut(2)
    assert {"layers.0.mlp.0.weight", "layers.2.norm.weight"} <= trainable(model)
    assert not {"layers.0.norm.weight", "layers.1.mlp.0.weight"} & trainable(model)
    assert "layers.0.mlp.0.weight" in told


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_training_equals_that_with_requires_grad_false(cut: int) -> None:
    """Three AdamW steps with momentum from two steps before: the same to the last bit, and the frozen ones do not move."""

    def train(by_hand: bool) -> tuple[Decoder, torch.optim.Optimizer]:
        model = decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        prefix = FrozenPrefix(model, optimizer)
        for step in range(5):
            if step == 2 and by_hand:
                for name, parameter in model.named_parameters():
                    if name in ("positions", "tokens.weight") or name.startswith(tuple(f"layers.{k}." for k in range(cut))):
                        parameter.requires_grad_(False)
                        parameter.grad = None
            elif step == 2:
                prefix.set_cut(cut)
            x = ids(seed=step)
            model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (ours, optimizer), (theirs, _) = train(False), train(True)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    kept = {id(p) for p in optimizer.state}
    assert kept == {id(p) for p in ours.parameters() if p.requires_grad}  # states of frozen ones are given back, others kept
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


def test_frozen_modules_stay_in_eval_and_run_without_gradients() -> None:
    model = decoder(dropout=0.5)
    prefix = frozen(model, 2)
    model.train()
    modes = {name: m.training for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert modes == {
        "dropout": False,
        "layers.0.dropout": False,
        "layers.1.dropout": False,
        "layers.2.dropout": True,
        "layers.3.dropout": True,
    }
    seen = []
    handle = model.layers[1].register_forward_hook(lambda _m, _a, out: seen.append(out))
    model.layers[0].register_forward_pre_hook(lambda _m, args: (args[0].detach().requires_grad_(),))  # as PEFT does
    model(ids(), ids()).backward()
    handle.remove()
    assert not seen[0].requires_grad
    assert type(model.layers[0]).__name__ == "Layer"
    prefix.remove()
    model.train()
    assert model.layers[0].dropout.training
    assert not any(isinstance(m, FrozenModule) for m in model.modules())


def test_it_takes_the_bytes_of_requires_grad_false() -> None:
    """By the allocator's accounting, step by step: nothing is kept for a frozen layer, nothing is added."""

    def build(by_hand: bool) -> Callable[[], Callable[[], object]]:
        def made() -> Callable[[], object]:
            model, x = decoder(), ids()
            if by_hand:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(name.startswith(("layers.2", "layers.3", "last_norm", "head")))
            else:
                frozen(model, 2)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

            def step() -> None:
                model(x, x).backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return made

    ours, theirs = measure_cpu(build(False)), measure_cpu(build(True))
    assert (ours.at_start, ours.peak, ours.at_end) == (theirs.at_start, theirs.peak, theirs.at_end)
    assert [event.delta for event in ours.timeline] == [event.delta for event in theirs.timeline]


def test_a_copy_of_the_model_is_its_own() -> None:
    model = decoder()
    prefix = frozen(model, 2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.01)
    assert not torch.equal(twin(ids()), model(ids()))
    assert torch.equal(frozen(copy.deepcopy(twin), 3).model(ids()), twin(ids()))
    assert prefix.cut == 2


@pytest.mark.parametrize("cut", [-1, 5, True, 1.5])
def test_a_cut_that_cannot_be(cut: Any) -> None:
    with pytest.raises(UsageError, match="has 4 layers"):
        frozen(decoder(), 0).set_cut(cut)


def test_a_prefix_only_grows() -> None:
    prefix = frozen(decoder(), 2)
    assert prefix.set_cut(2) == ""
    with pytest.raises(UsageError, match="only grows"):
        prefix.set_cut(1)


def test_nothing_freezes_before_a_pass_was_seen() -> None:
    with pytest.raises(UsageError, match="no forward pass"):
        FrozenPrefix(decoder()).set_cut(1)
    with pytest.raises(UsageError, match="nothing that the model returned has a gradient"):
        FrozenPrefix(decoder().requires_grad_(False)).observe(ids())


def test_a_model_without_layers() -> None:
    with pytest.raises(UsageError, match="no list of layers"):
        FrozenPrefix(nn.Linear(3, 3))


def test_a_layer_whose_forward_was_replaced() -> None:
    model = decoder()
    model.layers[1].forward = model.layers[1].forward  # type: ignore[method-assign]
    with pytest.raises(InconclusiveError, match="layer 1 has a forward that was set on the object"):
        frozen(model, 2)
    assert not any(isinstance(m, FrozenModule) for m in model.modules())  # nothing was frozen by halves


def test_models_that_cannot_be_frozen() -> None:
    with pytest.raises(UsageError, match=r"torch\.compile"):
        FrozenPrefix(torch.compile(decoder(), backend="eager"))
    sharded = decoder()
    sharded.__class__ = type("FSDPDecoder", (Decoder, type("FSDPModule", (), {})), {})  # as fully_shard makes it
    with pytest.raises(UsageError, match="sharded by FSDP"):
        FrozenPrefix(sharded)


def test_reentrant_checkpointing_of_transformers_still_trains() -> None:
    model = hugging_face("llama")
    model.activation_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    model.train()
    frozen(model, 2)
    model(ids(), labels=ids()).loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trainable(model)


def test_a_gradient_that_is_lost_is_an_error() -> None:
    """A model's own reentrant checkpointing: behind a frozen layer its input has no gradient, and PyTorch only warns."""

    class Checkpointed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layer, x, use_reentrant=True)

    model = decoder()
    model.layers = nn.ModuleList(Checkpointed(layer) for layer in model.layers)
    freezer = AutoFreeze(model, interval=2)
    freezer.prefix.observe(ids(), ids())
    freezer.prefix.set_cut(2)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model(ids(), ids()).backward()
    with pytest.raises(InconclusiveError, match="no gradient reached layer 2"):
        freezer.step()
