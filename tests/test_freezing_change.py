"""The test that freezes: changes of gradient norms, the percentile, the monotone prefix; the words it is told in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memir.runtime.freezing.change import GradientSums, decide
from tests.decoders import decoder, ids


def cut_of(before: list[float], now: list[float], cut: int = 0, percentile: float = 50) -> int:
    decision = decide(before, now, cut, percentile, most=len(now) - 1)
    assert decision is not None
    return decision.cut


def test_layers_below_the_percentile_freeze_up_to_the_first_that_is_not() -> None:
    # changes 0.1, 0.2, 0.9, 0.1, 0.5, 0.6; their median is (0.2 + 0.5) / 2
    assert cut_of([10] * 6, [9, 8, 1, 11, 5, 4]) == 2
    assert cut_of([10] * 6, [9, 8, 1, 11, 5, 4], cut=2) == 2
    assert cut_of([10] * 6, [9, 8, 1, 11, 5, 4], cut=3) == 4
    assert cut_of([10] * 6, [1, 8, 9, 11, 5, 4]) == 0


def test_equal_changes_freeze_nothing() -> None:
    assert cut_of([4, 4, 4], [2, 2, 2]) == 0


def test_the_last_layer_always_trains() -> None:
    assert cut_of([1, 1, 1], [1, 1, 2], percentile=100) == 2
    assert cut_of([1, 1, 1], [1, 1, 2], cut=2, percentile=100) == 2


def test_a_layer_without_gradients_has_not_changed() -> None:
    assert cut_of([0, 5, 5], [0, 4, 3]) == 1
    assert cut_of([0, 5, 5], [1, 4, 3]) == 0  # changed from nothing: infinitely


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_no_number_decides_nothing(bad: float) -> None:
    assert decide([1, 1, 1], [1, bad, 1], 0, 50, 2) is None
    assert decide([bad, 1, 1], [1, 1, 1], 1, 50, 2) is not None  # of a frozen layer


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=9), st.floats(0, 100), st.data())
def test_the_rule(norms: list[tuple[float, float]], percentile: float, data: st.DataObject) -> None:
    """As the paper's code says it, with torch.quantile for numpy.percentile."""
    cut = data.draw(st.integers(0, len(norms) - 1))
    before, now = [a for a, _ in norms], [b for _, b in norms]
    changes = torch.tensor([abs(a - b) / a for a, b in norms[cut:]], dtype=torch.float64)
    threshold = float(torch.quantile(changes, percentile / 100))
    decision = decide(before, now, cut, percentile, len(norms) - 1)
    assert decision is not None
    assert decision.threshold == pytest.approx(threshold)
    frozen = [c < decision.threshold for c in changes.tolist()]
    expected = cut + next((k for k, below in enumerate(frozen) if not below), len(frozen))
    assert decision.cut == min(expected, len(norms) - 1)


def test_why_is_said() -> None:
    grown = decide([10] * 4, [9, 8, 1, 5], 0, 50, 3)
    same = decide([10] * 4, [1, 8, 9, 5], 0, 50, 3)
    assert grown is not None
    assert same is not None
    assert grown.why() == (
        "layers 0 to 1 frozen: their gradient norms changed by 0.1, 0.2, below 0.35, percentile 50 of layers 0 to 3; "
        "layer 2 changed by 0.9"
    )
    assert same.why() == "layer 0 trains on: its gradient norm changed by 0.9, not below 0.35, percentile 50 of layers 0 to 3"


def test_the_sum_of_gradients_is_normed_not_the_norms_summed() -> None:
    model = decoder()
    sums = GradientSums(model.layers)
    expected = [torch.zeros(()) for _ in model.layers]
    totals: list[dict[str, torch.Tensor]] = [{} for _ in model.layers]
    for seed in range(3):
        model.zero_grad()
        (model(ids(), ids(seed=seed)) * (-1) ** seed).backward()
        for total, layer in zip(totals, model.layers, strict=True):
            for name, parameter in layer.named_parameters():
                assert parameter.grad is not None
                total[name] = total.get(name, torch.zeros(())) + parameter.grad
        assert sums.add(0)
    expected = [sum(t.abs().sum() for t in total.values()) for total in totals]
    assert sums.norms() == pytest.approx([float(e) for e in expected], rel=1e-5)
    num_parameters = sum(p.numel() for p in model.layers.parameters())
    assert sums.nbytes == 4 * num_parameters
    sums.restart(2)
    assert sums.norms() == [0, 0, 0, 0]
    assert sums.nbytes == 2 * num_parameters  # 2 of 4 equal layers


def test_without_a_gradient_for_the_first_trainable_layer() -> None:
    model = decoder()
    sums = GradientSums(model.layers)
    model(ids(), ids()).backward()
    model.layers[1].zero_grad()
    assert not sums.add(1)
    model.layers[1].requires_grad_(False)
    assert sums.add(1)  # it is not to have one
