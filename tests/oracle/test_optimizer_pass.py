"""The pass `optimizer` against the traced optimizers themselves: the same operators, the same live bytes at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from memir.errors import InconclusiveError, UsageError
from memir.frontend import trace as tracing
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.printer import to_text
from memir.ir.unroll import unroll
from memir.ir.verify import verify
from memir.passes.activation_checkpoint import ActivationCheckpoint
from memir.passes.freeze import Freeze
from memir.passes.optimizer import Optimizer
from memir.recipe import Lora, Recipe
from tests.oracle.test_checkpoint_pass import LAYERED, LLAMA, _live, _traced

SHALLOW = {"depth": "2"}
DEEP = {"depth": "9"}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def traced(recipe: Recipe, sets: dict[str, str] = SHALLOW, make: Make | None = None, *, fold: bool = False) -> Program:
    """The layered model's step, with an optimizer that `make` builds."""
    with pytest.MonkeyPatch.context() as patch:
        if make is not None:
            chosen = make
            patch.setattr(
                tracing, "make_optimizer", lambda module, recipe: chosen([p for p in module.parameters() if p.requires_grad])
            )
        return _traced(LAYERED, sets, recipe, fold=fold)


def agree(mine: Program, theirs: Program, depths: Sequence[int] = ()) -> None:
    verify(mine)
    assert parse(to_text(mine)) == mine
    for depth in depths:
        theirs_there = unroll(theirs, {"L": depth}) if "L" in theirs.dims else theirs
        assert _live(unroll(mine, {"L": depth})) == _live(theirs_there)
    if not depths:
        assert _live(mine) == _live(theirs)


@pytest.fixture(scope="module")
def plain() -> Program:
    return traced(Recipe())


@pytest.fixture(scope="module")
def folded() -> Program:
    return traced(Recipe(), DEEP, fold=True)


FORMS = (
    ("adamw", "foreach"),
    ("adamw", "for-loop"),
    ("adamw", "fused"),
    ("adam", "foreach"),
    ("adam", "for-loop"),
    ("sgd", "foreach"),
    ("sgd", "for-loop"),
    ("sgd", "fused"),
    ("adagrad", "foreach"),
    ("adagrad", "for-loop"),
    ("adagrad", "fused"),
    ("rmsprop", "foreach"),
    ("rmsprop", "for-loop"),
    ("adafactor", "foreach"),
    ("adafactor", "default"),
    ("muon", "default"),
    ("lion", "default"),
    ("adamw-8bit", "default"),
    ("adamw_8bit", "default"),
    ("paged-adamw", "default"),
    ("transformers-adafactor", "default"),
)


@pytest.mark.parametrize(("name", "impl"), FORMS, ids=str)
def test_every_form(plain: Program, name: str, impl: Any) -> None:
    agree(Optimizer(name, impl).run(plain), traced(Recipe(optimizer=name, optimizer_impl=impl)))


@pytest.mark.parametrize(
    ("name", "impl"),
    [("adamw", "for-loop"), ("sgd", "fused"), ("adafactor", "foreach"), ("adafactor", "for-loop"), ("muon", "default")],
)
def test_folded(folded: Program, name: str, impl: Any) -> None:
    """Layers stay folded, and at depths that were not traced the step is the traced one's; its own may not fold."""
    mine = Optimizer(name, impl).run(folded)
    assert mine.dims == folded.dims
    theirs = traced(Recipe(optimizer=name, optimizer_impl=impl), DEEP, fold=True)
    agree(mine, theirs, (5, 14) if "L" in theirs.dims else (9,))


def test_there_and_back(folded: Program) -> None:
    """The result does not depend on the optimizer that was traced."""
    through = Optimizer("muon").run(folded)
    for spec in (Optimizer("adafactor", "foreach"), Optimizer()):
        through = spec.run(through)
    agree(through, folded, (5,))


@pytest.mark.parametrize("impl", ["foreach", "for-loop", "fused"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_and_decay(plain: Program, impl: Any, momentum: float) -> None:
    form: dict[str, Any] = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    theirs = traced(
        Recipe(optimizer="sgd", optimizer_impl=impl),
        make=lambda found: torch.optim.SGD(found, momentum=momentum, weight_decay=0.1, **form),
    )
    agree(Optimizer("sgd", impl, momentum=momentum > 0, weight_decay="yes").run(plain), theirs)


@pytest.mark.parametrize("impl", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop"])
def test_decay_that_is_not_decoupled(plain: Program, name: str, impl: Any) -> None:
    momentum = {"momentum": 0.9} if name == "RMSprop" else {}
    theirs = traced(
        Recipe(optimizer=name, optimizer_impl=impl),
        make=lambda found: getattr(torch.optim, name)(found, weight_decay=0.1, foreach=impl == "foreach", **momentum),
    )
    agree(Optimizer(name.lower(), impl, momentum=bool(momentum), weight_decay="yes").run(plain), theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 1.0, "zero_grad": "first"},
        {"accumulate": 2},
        {"target": "cpu", "dtype": "f32", "clip": 1.0},
    ],
    ids=str,
)
def test_the_loop_around_it_stays(options: dict[str, Any]) -> None:
    base = traced(Recipe(**options))
    on_cpu = options.get("target") == "cpu"
    for name in ("sgd", "adagrad"):
        agree(Optimizer(name, cpu=on_cpu).run(base), traced(Recipe(**options, optimizer=name)))


@pytest.mark.parametrize("options", [{"loop": "trainer"}, {"lora": Lora(r=4)}], ids=str)
def test_hugging_face(options: dict[str, Any]) -> None:
    """Trainer's two groups; adapters, of which the first layer's gradients lie apart."""
    model, sets = LLAMA
    base, theirs = (
        _traced(model, {**sets, "num_hidden_layers": "9"}, Recipe(**options, **more), fold=True)
        for more in ({}, {"optimizer": "adagrad", "optimizer_impl": "foreach"})
    )
    agree(Optimizer("adagrad").run(base), theirs, (5, 14))


class Masters(torch.optim.Optimizer):
    """megatron/core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params: fp32 copies are updated and copied back."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.found = parameters
        for parameter in parameters:
            self.state[parameter]["master"] = parameter.detach().clone().float()
        self.inner = torch.optim.AdamW([self.state[p]["master"] for p in parameters], foreach=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        copies = [self.state[p]["master"] for p in self.found]
        for parameter, copy in zip(self.found, copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
            parameter.grad = None
        self.inner.step()
        for parameter, copy in zip(self.found, copies, strict=True):
            self.state[parameter] |= dict(self.inner.state[copy])
            parameter.copy_(copy)
        self.inner.zero_grad()


def test_master_weights(plain: Program, folded: Program) -> None:
    theirs = traced(Recipe(), make=Masters)
    agree(Optimizer("adamw", dtype="f32").run(plain), theirs)
    mine = Optimizer("adamw", dtype="f32").run(folded)
    verify(mine)
    deep = traced(Recipe(), {"depth": "5"}, make=Masters)
    agree(mine, deep, (5,))


def test_after_other_passes(folded: Program) -> None:
    """Passes that say who is trained and what is kept come before or after, which is the same."""
    sgd = traced(Recipe(optimizer="sgd"), DEEP, fold=True)
    for other in (Freeze(cut=2), ActivationCheckpoint()):
        agree(Optimizer("sgd").run(other.run(folded)), other.run(sgd), (7,))


def test_without(plain: Program) -> None:
    agree(Optimizer("none").run(plain), traced(Recipe(optimizer="none")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name_": "nadam"}, "a step of 'nadam' is not described"),
        ({"name_": "rmsprop", "impl": "fused"}, "RMSprop has no fused form|rmsprop has no fused form"),
        ({"name_": "adamw", "momentum": True}, "momentum is an option of sgd and rmsprop"),
        ({"name_": "muon", "weight_decay": "no"}, "weight decay is not described"),
        ({"name_": "none", "dtype": "f32"}, "there are no copies"),
    ],
    ids=str,
)
def test_refused(plain: Program, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Optimizer(**options).run(plain)


def test_gradients_that_live_on_are_not_copied() -> None:
    with pytest.raises(InconclusiveError, match="live on into the next step"):
        Optimizer(dtype="f32").run(traced(Recipe(zero_grad="first")))
