"""activation-checkpoint against PyTorch's own checkpointing, traced: the same live bytes at every operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memir.analysis.liveness import timeline
from memir.errors import InconclusiveError, UsageError
from memir.frontend import trace as tracing
from memir.frontend.load import load_target
from memir.frontend.loaded import LoadedModel
from memir.frontend.prepare import prepare
from memir.frontend.quiet import quiet
from memir.ir.core import Op, Program
from memir.ir.parser import parse
from memir.ir.printer import to_text
from memir.ir.size import Size
from memir.ir.unroll import bind, unroll
from memir.ir.verify import verify
from memir.passes.activation_checkpoint import ActivationCheckpoint
from memir.passes.freeze import Freeze
from memir.recipe import Recipe

LAYERED = str(Path(__file__).parents[1] / "cases" / "layered.py")
BARE = {"hidden_size": "32", "vocab_size": "96", "num_attention_heads": "4", "num_hidden_layers": "3"}
LLAMA = ("llama-3.2-1b", {**BARE, "intermediate_size": "64", "num_key_value_heads": "2", "head_dim": "8"})
GPT2 = ("gpt2", {"n_embd": "32", "n_head": "4", "vocab_size": "96", "n_layer": "3"})
AT = {"B": 2, "S": 24}
Wrap = Callable[[nn.Module, list[nn.Module]], None]


def _traced(target: str, sets: dict[str, str], recipe: Recipe, wrap: Wrap | None = None, fold: bool = False) -> Program:
    def load() -> LoadedModel:
        return load_target(target, recipe=recipe, sets=sets)

    def wrapped(loaded: LoadedModel, recipe: Recipe) -> nn.Module:
        module = prepare(loaded, recipe)
        if wrap is not None:
            modules = dict(module.named_modules())
            wrap(module, [modules[path] for path in loaded.layers])
        return module

    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(tracing, "prepare", wrapped)
        return tracing.trace(load, recipe, AT["B"], AT["S"], fold=fold).program


def _every(every: int, **options: Any) -> Wrap:
    def wrap(_: nn.Module, layers: list[nn.Module]) -> None:
        for layer in layers[every - 1 :: every]:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)  # type: ignore[method-assign]

    return wrap


def _as_torchtitan() -> Any:
    """Of matrix products every second one is computed again (torchtitan/distributed/activation_checkpoint.py, SelectiveAC)."""
    products = 0

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        nonlocal products
        products += op is torch.ops.aten.mm.default
        kept = products % 2 == 1 if op is torch.ops.aten.mm.default else op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _live(program: Program) -> list[tuple[str, str, int]]:
    line = timeline(program)
    running = line.evaluate(AT).running
    found = [(step.phase.name, step.op.opcode, nbytes) for step, nbytes in zip(line.steps, running, strict=True)]
    return [item for item in found if not item[1].startswith("memir.")]


def _first_run(program: Program) -> list[object]:
    """What the first forward's operators make, drop and free: its names are those of the program without checkpoints."""
    kinds = {s.name: s.kind for s in program.storages}
    ops = [op for op in program.phases[0].ops if isinstance(op, Op) and not op.opcode.startswith("memir.")]
    states = {s.name for s in program.storages if s.nbytes == Size.of(5056)}  # of the generator
    return [
        (op.opcode, [(r.name, kinds[r.storage]) for r in op.results], sorted(op.drops), sorted(set(op.frees) - states))
        for op in ops
    ]


def _agree(mine: Program, theirs: Program) -> None:
    verify(mine)
    assert _live(mine) == _live(theirs)
    assert _first_run(mine) == _first_run(theirs)


@pytest.fixture(scope="module")
def plain() -> Program:
    return _traced(LAYERED, {}, Recipe())


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"amp": "bf16", "dtype": "f32"},
        {"accumulate": 2, "optimizer": "sgd"},
        {"target": "cpu"},
        {"keep_outputs": True, "clip": 1.0, "zero_grad": "first"},
    ],
    ids=lambda r: ",".join(r) or "plain",
)
def test_every_layer(recipe: dict[str, Any]) -> None:
    without, full = (_traced(LAYERED, {}, Recipe(**recipe, checkpoint=policy)) for policy in ("none", "full"))
    _agree(ActivationCheckpoint(rng=recipe.get("target") == "cpu").run(without), full)


@pytest.mark.parametrize(("model", "passed"), [(GPT2, ()), (LLAMA, ("add_tensor",))], ids=["gpt2", "llama"])
def test_hugging_face(model: tuple[str, dict[str, str]], passed: tuple[str, ...]) -> None:
    """A Llama's layers are called with position ids that they do not read: the sum in transformers' LlamaModel.forward."""
    without, full = (_traced(*model, Recipe(checkpoint=policy)) for policy in ("none", "full"))
    _agree(ActivationCheckpoint(passed=passed).run(without), full)
    if passed:
        mine, theirs = (max(nbytes for *_, nbytes in _live(p)) for p in (ActivationCheckpoint().run(without), full))
        assert theirs - mine == 8 * AT["S"]


@pytest.mark.parametrize("every", [2, 3])
def test_some_layers(plain: Program, every: int) -> None:
    _agree(ActivationCheckpoint("every-n", every).run(plain), _traced(LAYERED, {}, Recipe(), _every(every)))


def test_without_early_stop(plain: Program) -> None:
    theirs = _traced(LAYERED, {}, Recipe(), _every(1, early_stop=False))
    _agree(ActivationCheckpoint(early_stop=False).run(plain), theirs)


def _reentrant(_: nn.Module, layers: list[nn.Module]) -> None:
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)  # type: ignore[method-assign]


def _by_switch(model: nn.Module, _: list[nn.Module]) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # type: ignore[operator]


@pytest.mark.parametrize(
    "recipe",
    [{}, {"amp": "bf16", "dtype": "f32"}, {"accumulate": 2, "optimizer": "sgd"}, {"target": "cpu"}],
    ids=lambda r: ",".join(r) or "plain",
)
def test_reentrant(recipe: dict[str, Any]) -> None:
    """The gradient that a layer is given is held, so that sums with it are tensors of their own: real PyTorch does so."""
    without, full = (_traced(LAYERED, {}, Recipe(**recipe), wrap) for wrap in (None, _reentrant))
    mine = ActivationCheckpoint(reentrant=True, rng=recipe.get("target") == "cpu").run(without)
    verify(mine)
    assert _live(mine) == _live(full)


EQUAL_HEADS = (LLAMA[0], {**LLAMA[1], "num_key_value_heads": "4"})
ROTATION = ("add_tensor", "_to_copy_default_1", "_to_copy_default_2")  # position ids, cosines and sines


@pytest.mark.parametrize(
    ("model", "keywords", "attention"),
    [(GPT2, ("add_tensor",), "sdpa"), (LLAMA, ROTATION, "sdpa"), (EQUAL_HEADS, ROTATION, "efficient")],
    ids=["gpt2", "llama", "efficient"],
)
def test_reentrant_hugging_face(model: tuple[str, dict[str, str]], keywords: tuple[str, ...], attention: str) -> None:
    """Its layers get all but the first argument by keyword. Without a gradient the efficient kernel makes no log-sum-exp."""
    without, full = (_traced(*model, Recipe(attention=attention), wrap) for wrap in (None, _by_switch))
    mine = ActivationCheckpoint(reentrant=True, keywords=keywords).run(without)
    verify(mine)
    assert _live(mine) == _live(full)


def test_a_reentrant_layer_needs_an_input_with_a_gradient(plain: Program) -> None:
    frozen = Freeze(cut=1).run(plain)
    with pytest.raises(UsageError, match="no input of the layer needs a gradient"):
        ActivationCheckpoint(reentrant=True).run(frozen)


SAVED = {
    "torchtitan": ((), _as_torchtitan),
    "sigmoid": (("aten.sigmoid",), partial(create_selective_checkpoint_contexts, [torch.ops.aten.sigmoid.default])),
    "all products": (
        ("aten.mm", "aten.addmm"),
        partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
    ),
    "the last": (("aten.add.Tensor",), partial(create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor])),
}


@pytest.mark.parametrize("name", SAVED)
def test_selective(plain: Program, name: str) -> None:
    save, contexts = SAVED[name]
    theirs = _traced(LAYERED, {}, Recipe(), _every(1, context_fn=contexts))
    _agree(ActivationCheckpoint("selective", save=save).run(plain), theirs)


@pytest.fixture(scope="module")
def folded() -> Program:
    return _traced(LAYERED, {"depth": "9"}, Recipe(), fold=True)


@pytest.mark.parametrize(
    "options", [{}, {"policy": "selective"}, {"rng": True}, {"early_stop": False}, {"reentrant": True}], ids=str
)
def test_lifted(folded: Program, options: dict[str, Any]) -> None:
    """Over the depth L, and at depths that no sample had, the same as on the layers written out."""
    checkpointing = ActivationCheckpoint(**options)
    lifted = checkpointing.run(folded)
    verify(lifted)
    assert lifted.dims == folded.dims
    assert parse(to_text(lifted)) == lifted
    for depth in (5, 14):
        assert _live(unroll(lifted, {"L": depth})) == _live(checkpointing.run(unroll(folded, {"L": depth})))
    assert _live(checkpointing.run(bind(folded, {"L": 6}))) == _live(unroll(lifted, {"L": 6}))


def test_every_other_layer_is_not_lifted(folded: Program) -> None:
    with pytest.raises(InconclusiveError, match="do not repeat") as caught:
        ActivationCheckpoint("every-n").run(folded)
    assert "bind{L=" in (caught.value.hint or "")


def test_again(plain: Program) -> None:
    with pytest.raises(UsageError, match="checkpointed already"):
        ActivationCheckpoint().run(ActivationCheckpoint().run(plain))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"passed": ("nowhere",)}, "no storage of that name"),
        ({"passed": ("native_layer_norm_default",)}, "not there when the layer is called"),
        ({"policy": "selective", "save": ("aten.view",)}, "makes a view"),
        ({"policy": "selective", "save": ("aten.nothing",)}, "no layer has"),
        ({"policy": "selective", "reentrant": True}, "not reentrant"),
        ({"keywords": ("_to_copy_default",)}, "for reentrant"),
    ],
    ids=str,
)
def test_refused(plain: Program, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ActivationCheckpoint(**options).run(plain)
