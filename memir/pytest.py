"""A pytest plugin: memory budgets as assertions and as markers. docs/check.md, "pytest", has both.

    assert_peak("model.py:GPT", B=2, S=128, max="1GiB")

    @pytest.mark.memory_budget("model.py:GPT", B=2, S=128, max="1GiB")

It imports nothing of memir until a budget is to be checked. A budget that cannot be read is an error, one that cannot be
proved a failure: neither is a pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memir.check.judge import Outcome

MARKER = "memory_budget"
_BUDGETS = ("max", "max_order", "fits", "max_saved_per_layer")


def assert_peak(
    model: Any,  # what TARGET is, or an nn.Module
    *,
    B: int | None = None,  # noqa: N803  (as the formulas name them)
    S: int | None = None,  # noqa: N803
    **keys: Any,
) -> int:
    """The requested bytes at the peak of one training step of `model`, a target or a module, if it keeps the budgets.

    `keys` are those of a scenario (docs/check.md): budgets, at least one of them (max, max_order, fits,
    max_saved_per_layer), and how it is trained (dtype, optimizer, checkpoint, set, ...). AssertionError: a budget is exceeded,
    or memir cannot prove the number. UsageError: something that cannot be meant.
    """
    outcome = _outcome(model, B, S, keys)
    problems = [f"{reason.rule.name}: {reason.text}" for reason in outcome.reasons]
    if problems:
        raise AssertionError("\n".join([f"{outcome.scenario.target}: {outcome.status}", *problems]))
    assert outcome.facts is not None
    return outcome.facts.requested


def _outcome(model: Any, batch: int | None, seq: int | None, keys: dict[str, Any]) -> Outcome:
    from memir.check.config import scenario_of
    from memir.check.facts import facts
    from memir.check.judge import judge
    from memir.errors import UsageError

    if not any(name in keys for name in _BUDGETS):
        raise UsageError("assert_peak without a budget checks nothing", hint=f"give one of {', '.join(_BUDGETS)}")
    target = model if isinstance(model, str) else type(model).__name__
    given = {**keys, "target": target, **{n: v for n, v in (("batch", batch), ("seq", seq)) if v is not None}}
    scenario = scenario_of(target, given)
    found = facts(model, scenario.recipe, scenario.keywords(), scenario.budgets.fits)
    return judge(scenario, found, None)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    text = f"{MARKER}(target, B=2, S=128, max='1GiB', ...): fail the test if a training step of the target takes more"
    config.addinivalue_line("markers", text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Checks the markers of a test before it runs."""
    for marker in item.iter_markers(MARKER):
        from memir.errors import MemirError

        if len(marker.args) != 1:
            pytest.fail(f"{MARKER} takes one target: {marker.args!r}", pytrace=False)
        try:
            assert_peak(marker.args[0], **marker.kwargs)
        except (AssertionError, MemirError, TypeError) as error:
            pytest.fail(f"{MARKER}: {error}", pytrace=False)
