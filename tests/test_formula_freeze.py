"""The formula with frozen layers, the cut a symbol: at every cut the pass `freeze` on a fresh trace, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import memir
from memir.api import TracedProgram, program_of, wide_step
from memir.cli import main
from memir.derivation.bounds import CUT
from memir.derivation.cuts import at_cut, by_cut, in_cases
from memir.derivation.derive import Derivation, Quantity
from memir.derivation.solve_cut import smallest
from memir.derivation.step import WideStep, shown
from memir.derivation.write_code import to_python, to_sympy_text
from memir.errors import UsageError
from memir.ir.unroll import unroll
from memir.passes.freeze import Freeze

GPT = str(Path(__file__).resolve().parents[1] / "examples" / "gpt.py")
SETS = {"n_layer": 9, "n_embd": 64, "n_head": 2, "vocab_size": 300, "block_size": 64}
OTHER = {"n_layer": 11, "n_embd": 120, "n_head": 3, "vocab_size": 211, "block_size": 70}


def names(sets: dict[str, int]) -> dict[str, int]:
    """The symbols of a point."""
    layers, hidden, heads, vocabulary, positions = sets.values()
    return {"B": 3, "S": 37, "L": layers, "h": hidden, "V": vocabulary, "a": heads, "P": positions}


@pytest.fixture(scope="module")
def step() -> WideStep:
    return wide_step(GPT, batch=2, seq=32, sets=SETS)


@pytest.fixture(scope="module")
def found(step: WideStep) -> list[Quantity]:
    derivations = [Derivation(shown(one), everywhere=True) for one in by_cut(step)]
    return [quantity for name in ("peak", "states") for quantity in in_cases(derivations, name)]


@pytest.fixture(scope="module", params=[SETS, OTHER], ids=["own", "other"])
def fresh(request: pytest.FixtureRequest) -> tuple[TracedProgram, dict[str, int]]:
    point = names(request.param)
    return program_of(GPT, batch=point["B"], seq=point["S"], sets=request.param, cache=False), point


def test_every_cut_is_the_pass_on_a_fresh_trace(
    found: list[Quantity], fresh: tuple[TracedProgram, dict[str, int]], tmp_path: Path
) -> None:
    """By the Python function, which has all ranges of the cut and needs no memir."""
    traced, point = fresh
    space: dict[str, object] = {}
    exec(to_python(found[0].shown, found, "bytes"), space)
    flat = unroll(traced.program, {"L": point["L"]})
    for cut in range(point["L"]):  # one more leaves the final norm and the head's tied table
        frozen = Freeze(cut=cut).run(flat)
        expected = memir.peak(frozen).evaluate({"B": point["B"], "S": point["S"]})[0]
        at = {**point, CUT: cut}
        assert space["peak"](**{name: at[name] for name in found[0].shown.env}) == expected, cut  # type: ignore[operator]


def test_a_cut_that_is_a_number(step: WideStep, fresh: tuple[TracedProgram, dict[str, int]]) -> None:
    traced, point = fresh
    for cut in (2, 8):
        one = at_cut(step, cut)
        if "L" not in one.program.dims and point["L"] != step.env["L"]:
            assert any(text.startswith("L = 9") for text in one.numbers)
            continue
        derivation = Derivation(shown(one), everywhere=True)
        frozen = Freeze(cut=cut).run(unroll(traced.program, {"L": point["L"]}))
        concrete = memir.peak(frozen).evaluate({"B": point["B"], "S": point["S"]})[0]
        assert max(size.evaluate(point) for size in derivation.quantity("peak").every) == concrete, cut


def test_sympy_has_the_ranges_of_the_cut(found: list[Quantity]) -> None:
    import sympy

    piecewise = eval(to_sympy_text(found).splitlines()[0].partition(" = ")[2], vars(sympy))
    symbols = sorted(piecewise.free_symbols, key=str)
    function = sympy.lambdify(symbols, piecewise, modules="math")
    peak, numbers = smallest([quantity for quantity in found if quantity.name == "peak"], 1)
    assert peak is None
    for cut in (1, 4, 8):
        at = {**found[0].shown.env, CUT: cut}
        assert function(*(at[symbol.name] for symbol in symbols)) == numbers[cut]


def test_the_smallest_cut_that_fits(found: list[Quantity]) -> None:
    peak = [quantity for quantity in found if quantity.name == "peak"]
    cut, numbers = smallest(peak, 2**60)
    assert cut == 0
    assert sorted(numbers) == list(range(len(numbers)))
    for budget in (numbers[4], numbers[4] - 1):
        cut, _ = smallest(peak, budget)
        assert cut is not None
        assert numbers[cut] <= budget < min(numbers[c] for c in range(cut))
    assert smallest(peak, 1)[0] is None


def test_a_cut_that_the_model_has_not(step: WideStep) -> None:
    with pytest.raises(UsageError, match="the model has 9 layers"):
        at_cut(step, 10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--freeze", "x"], "neither a number of layers nor c"),
        (["--freeze", "c", "--solve", "B", "--gpu", "1GiB"], "--solve B is for one cut"),
        (["--freeze", "4", "--solve", "cut", "--gpu", "1GiB"], "the cut is 4 already"),
        (["--freeze", "c", "--versus", "--attention eager"], "a comparison is of one cut"),
        (["--freeze", "c", "--fsdp", "8"], "the cut as a symbol"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["formula", GPT, *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
