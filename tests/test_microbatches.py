"""Many micro-batches from three: the same peaks as a trace of all of them."""

from __future__ import annotations

import pytest

from memir.analysis.liveness import timeline
from memir.frontend.load import load_target
from memir.frontend.quiet import quiet
from memir.frontend.trace import Traced, trace
from memir.ir.core import Phase
from memir.recipe import Recipe
from tests.test_folding import MODELS


def _traced(recipe: Recipe, depth: int, fold: bool) -> Traced:
    target, field, _, others, _ = MODELS["gpt2, tied"]
    sets = {field: str(depth), **{name: str(value) for name, value in others.items()}}
    with quiet():
        return trace(lambda: load_target(target, recipe=recipe, sets=sets), recipe, 2, 24, fold=fold)


@pytest.mark.parametrize("recipe", [Recipe(accumulate=6), Recipe(accumulate=6, keep_outputs=True, zero_grad="first", clip=1.0)])
def test_three_stand_for_six(recipe: Recipe) -> None:
    some, every = _traced(recipe, 2, True), _traced(recipe, 2, False)
    assert [p.name for p in some.program.phases] == [
        *("micro0.forward", "micro0.backward", "micro1-4.forward", "micro1-4.backward"),
        *("micro5.forward", "micro5.backward", "optimizer"),
    ]
    numbers = {}
    for traced in (some, every):
        line = timeline(traced.program)
        found = line.evaluate({"B": 3, "S": 50})
        for step, number in zip(line.steps, found.running, strict=True):
            numbers.setdefault((traced is some, step.phase.name), []).append(number)
    for name, running in [(name, running) for (folded, name), running in numbers.items() if not folded]:
        micro, _, rest = name.partition(".")
        same = name if micro in ("micro0", "micro5", "optimizer") else f"micro1-4.{rest}"
        assert numbers[True, same] == running
    assert sum(n for _, n in some.program.counted({})) == sum(n for _, n in every.program.counted({}))


def test_in_a_folded_program() -> None:
    folded = _traced(Recipe(accumulate=5), 7, True)
    every = _traced(Recipe(accumulate=5), 7, False)
    assert folded.dims == {"L": 7}
    at = {"B": 3, "S": 50}
    assert timeline(folded.program).evaluate({**at, "L": 7}).peak == timeline(every.program).evaluate(at).peak
    assert sum(n for _, n in folded.program.counted({"L": 7})) == sum(n for _, n in every.program.counted({}))


@pytest.mark.parametrize(
    ("name", "times"), [("forward", 1), ("micro3.forward", 1), ("micro1-62.backward", 62), ("a-b.forward", 1), ("optimizer", 1)]
)
def test_a_phase_says_how_many_it_stands_for(name: str, times: int) -> None:
    assert Phase(name, ()).times == times
