"""The pytest plugin: assert_peak and the marker, in a pytest of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from memir.errors import UsageError
from memir.pytest import assert_peak
from tests.test_check import facts

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[1]
MODEL = str(ROOT / "tests/regressions/head_tied/after.py")


def test_a_real_step_and_its_budget() -> None:
    nbytes = assert_peak(MODEL, B=2, S=16, dtype="f32", max="16MiB", max_order="B*S")
    assert 2**20 < nbytes < 2**24
    with pytest.raises(AssertionError, match="budget-exceeded"):
        assert_peak(MODEL, B=2, S=16, dtype="f32", max=nbytes // 2)


def test_a_module_can_be_asked_too() -> None:
    import torch

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(32, 8)
            self.head = torch.nn.Linear(8, 32)

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.head(torch.tanh(self.tokens(ids)))
            return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    assert assert_peak(Tiny(), B=2, S=8, max="1MiB") > 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Steps are not traced: "doubtful.py" is inconclusive."""
    calls: list[dict[str, Any]] = []

    def answer(target: str, recipe: Any, keywords: dict[str, Any], fits: Any) -> Any:
        calls.append({"target": target, **keywords})
        return dataclasses.replace(facts(), inconclusive=("no rule",) if target == "doubtful.py" else ())

    monkeypatch.setattr("memir.check.facts.facts", answer)
    return calls


@pytest.mark.parametrize("keys", [{}, {"dtype": "f32"}, {"max": "76GB"}, {"max": "1GiB", "bacth": 3}])
def test_what_checks_nothing_or_cannot_be_meant_is_an_error(asked: list[Any], keys: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        assert_peak("model.py", B=2, **keys)
    assert asked == []


def test_markers(pytester: pytest.Pytester, asked: list[dict[str, Any]]) -> None:
    pytester.makepyfile(
        """
        import pytest
        budget = pytest.mark.memory_budget

        @budget("model.py", B=2, S=128, max="1GiB")
        def test_within(): pass

        @budget("model.py", B=2, S=128, max="1KiB")
        def test_over(): raise SystemExit("must not run")

        @budget("doubtful.py", max="1GiB")
        def test_doubtful(): pass

        @budget("model.py")
        def test_without_a_budget(): pass

        @budget(max="1GiB")
        def test_without_a_target(): pass

        def test_plain(): pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "memir.pytest", "--strict-markers")
    result.assert_outcomes(passed=2, errors=4)
    text = result.stdout.str()
    for words in ("budget-exceeded: 0.10 MiB allocated", "inconclusive: no rule", "checks nothing", "takes one target"):
        assert words in text
    step = {"target": "model.py", "batch": 2, "seq": 128, "sets": {}, "inputs": None, "trust_remote_code": False}
    assert asked[0] == {**step, "parallel": ""}
