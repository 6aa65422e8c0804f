"""A formula over widths against a step that really runs, at widths at which nothing was traced."""

from __future__ import annotations

from pathlib import Path

import memir
from memir.api import wide_step
from memir.derivation.derive import Derivation
from memir.derivation.step import shown
from memir.runtime.real import RealStep, measure_in_child

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt.py")
RECIPE = memir.Recipe(target="cpu", dtype="f32")


def test_a_real_step_takes_what_the_formula_says() -> None:
    step = wide_step(GPT, RECIPE, sets={"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "block_size": 256})
    derivation = Derivation(shown(step), everywhere=True)
    widths = {"n_layer": 7, "n_embd": 120, "n_head": 3, "vocab_size": 1777, "block_size": 200}
    symbols = {name: symbol for name, symbol in step.fields if name}
    env = {"B": 3, "S": 130, **{symbols[name]: value for name, value in widths.items()}}
    measured = measure_in_child(RealStep(GPT, RECIPE, env["B"], env["S"], {name: str(value) for name, value in widths.items()}))
    for name, figure in (("peak", measured.peak), ("steady", measured.at_start)):
        formula = max(size.evaluate(env) for size in derivation.quantity(name).every)
        assert abs(formula - figure) <= 1024  # Python numbers that autograd keeps as tensors of 8 bytes
