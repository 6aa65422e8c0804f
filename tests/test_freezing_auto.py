"""AutoFreeze in a plain loop: when it tests, what it says, and a resumed run that goes on as if it had not ended."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memir.freezing
from memir.errors import UsageError
from memir.freezing import AutoFreeze
from memir.runtime.freezing.change import decide
from tests.decoders import Decoder, decoder, ids

ROOT = Path(__file__).resolve().parent.parent


def make(**options: Any) -> tuple[Decoder, torch.optim.Optimizer, AutoFreeze]:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, AutoFreeze(model, optimizer=optimizer, **({"interval": 3} | options))


def steps(model: Decoder, optimizer: torch.optim.Optimizer, freezer: AutoFreeze, numbers: range) -> None:
    for number in numbers:
        x = ids(seed=number)
        model(x, x).backward()
        freezer.step()
        optimizer.step()
        optimizer.zero_grad()


def test_it_tests_at_the_end_of_each_interval_from_the_second_on() -> None:
    """Against an account kept by hand: summed gradients of each interval, their L1 norms."""
    model, optimizer, freezer = make()
    before: list[float] | None = None
    cuts, sums = [], {}
    for number in range(18):
        x = ids(seed=number)
        model(x, x).backward()
        for name, parameter in model.layers.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad
        freezer.step()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            now = [sum(float(t.abs().sum()) for n, t in sums.items() if n.startswith(f"{k}.")) for k in range(4)]
            if before is not None:
                decision = decide(before, now, cuts[-1] if cuts else 0, 50, 3)
                assert decision is not None
                cuts.append(decision.cut)
            before, sums = now, {}
    assert [event.step for event in freezer.events] == [6, 9, 12, 15, 18][: len(freezer.events)]
    assert [event.cut for event in freezer.events] == cuts[: len(freezer.events)]
    assert freezer.cut == cuts[-1] == 3
    assert freezer.nbytes == 0  # no layer can freeze any more


def test_what_happened_is_logged_with_what_it_bought(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memir.freezing")
    model, optimizer, freezer = make(predict=lambda cut: (2**30 * (8 - cut), 1 - cut / 10))
    steps(model, optimizer, freezer, range(18))
    grown = [event for event in freezer.events if event.cut > event.old]
    assert grown
    for event in grown:
        assert f"below " in event.why  # noqa: F541
        assert f"peak {8 - event.old}.00 -> {8 - event.cut}.00 GiB" in event.why
        assert f"time of a step {1 - event.old / 10:.2f} -> {1 - event.cut / 10:.2f} of that at cut 0" in event.why
        assert "parameters stay trainable" in event.why
    assert [r.getMessage() for r in caplog.records] == [f"step {e.step}: cut {e.cut} of 4: {e.why}" for e in freezer.events]


@pytest.mark.parametrize("at", [2, 7, 10, 16])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(at: int) -> None:
    model, optimizer, freezer = make()
    steps(model, optimizer, freezer, range(18))
    assert len({event.cut for event in freezer.events}) > 1
    first, first_optimizer, first_freezer = make()
    steps(first, first_optimizer, first_freezer, range(at))
    saved = io.BytesIO()
    torch.save([first.state_dict(), first_optimizer.state_dict(), first_freezer.state_dict()], saved)
    saved.seek(0)
    weights, moments, state = torch.load(saved, weights_only=True)
    again, again_optimizer, again_freezer = make()
    again.load_state_dict(weights)
    again_optimizer.load_state_dict(moments)
    again_freezer.load_state_dict(state)
    assert again_freezer.cut == first_freezer.cut
    steps(again, again_optimizer, again_freezer, range(at, 18))
    assert again_freezer.events == freezer.events
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_gradient_that_is_no_number_freezes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, freezer = make()
    model(ids(), ids()).backward()
    for _ in range(6):
        model.layers[0].norm.weight.grad.fill_(torch.nan)
        freezer.step()
    assert freezer.cut == 0
    assert "not a finite number" in caplog.text
    optimizer.zero_grad()


def test_transformers_is_imported_for_the_callback_only() -> None:
    code = "import sys, memir.freezing; assert 'transformers' not in sys.modules; memir.freezing.FreezingCallback"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'Freezing'"):
        memir.freezing.Freezing  # noqa: B018


def test_at_most() -> None:
    model, optimizer, freezer = make(most=1)
    steps(model, optimizer, freezer, range(18))
    assert freezer.cut == 1


@pytest.mark.parametrize(
    "options",
    [{"interval": 0}, {"interval": 2.5}, {"percentile": -1}, {"percentile": 101}, {"most": 4}, {"most": -1}],
)
def test_values_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**options)


def test_a_state_of_another_model() -> None:
    _, _, freezer = make()
    state = freezer.state_dict()
    with pytest.raises(UsageError, match="3 layers"):
        freezer.load_state_dict({**state, "num_layers": 3})
    with pytest.raises(UsageError, match=r"no parameter 'wte\.weight'"):
        freezer.load_state_dict({**state, "before": {"parameters": ["wte.weight"], "tied": [], "modules": []}})
