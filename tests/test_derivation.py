"""Quantities over widths from programs written by hand: pieces, terms and their origins, what is printed, what fits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memir.derivation.derive import Derivation
from memir.derivation.difference import to_difference
from memir.derivation.layout import conditions, plain_style, products, size_text
from memir.derivation.solve import solve, to_solution
from memir.derivation.step import WideStep, shown
from memir.derivation.write_code import python_text, to_python, to_sympy_text
from memir.derivation.write_latex import latex_style, to_latex, to_markdown
from memir.derivation.write_text import to_text
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.size import Size, ceil_div, floor_div
from memir.ir.sizetext import parse_size
from memir.ir.substitute import condition_with

LAYERS = """memir 1
program @layers
dim B, S, a, d, V, L
domain L >= 3
domain a >= 2
domain d % 8 == 0
domain d <= 64
storage $ids : 8*B*S input live_in live_out
storage $emb : 2*V*a*d parameter live_in live_out
storage $w[L] : 2*a^2*d^2 parameter live_in live_out
storage $m[L] : 4*a^2*d^2 optimizer_state of $w[L] live_in live_out
storage $h[-1] : 2*B*S*a*d activation
storage $h[L] : 2*B*S*a*d activation
storage $p[L] : 2*B*S^2*a activation
storage $logits : 4*B*S*V activation
storage $dlogits : 4*B*S*V temporary
storage $dh : 2*B*S*a*d temporary
storage $g[L] : 2*a^2*d^2 gradient of $w[L]
storage $root : 6*a^2*d^2 temporary
value %ids: i64[B, S] in $ids
value %emb: bf16[V, a*d] in $emb
value %w[L]: bf16[a*d, a*d] in $w[L]
value %m[L]: bf16[2, a*d, a*d] in $m[L]
phase forward
  %h[-1]: bf16[B, S, a*d] in $h[-1] = aten.embedding(%emb, %ids) at @tokens from model.py:9
  repeat i < L
    %p[i]: bf16[B, a, S, S] in $p[i] = aten.bmm(%h[i-1]) saves $p[i] at @layers.{i}.attention from model.py:12
    %h[i]: bf16[B, S, a*d] in $h[i] = aten.mm(%p[i], %w[i]) saves $h[i-1] at @layers.{i}.up from model.py:13
  %logits: f32[B, S, V] in $logits = aten.mm(%h[L-1], %emb) saves $logits scratch 4096*ceil(S/128) at @head from model.py:20
phase backward
  %dlogits: f32[B, S, V] in $dlogits = aten._log_softmax_backward_data(%logits) frees $logits at @head from model.py:21
  %dh: bf16[B, S, a*d] in $dh = aten.mm(%dlogits, %emb) frees $dlogits, $h[L-1] at @head from model.py:20
  repeat i < L
    %g[L-1-i]: bf16[a*d, a*d] in $g[L-1-i] = aten.mm(%dh, %h[L-2-i]) frees $h[L-2-i], $p[L-1-i] at @layers.{L-1-i}.up from model.py:13
  memir.free() frees $dh
phase optimizer
  %root: bf16[3, a*d, a*d] in $root = aten._foreach_sqrt(%m[:L], %g[:L]) from adam.py:7
  memir.free() frees $root, $g[:L]
"""  # noqa: E501


def step(text: str = LAYERS, **values: int) -> WideStep:
    program: Program = parse(text)
    env = {"B": 2, "S": 64, "L": 4, "a": 4, "d": 32, "V": 1000, **values}
    return WideStep(
        program=program,
        symbols=(("a", Size.of("a")), ("h", Size.of("a") * Size.of("d")), ("d", Size.of("d")), ("V", Size.of("V"))),
        fields=(("n_embd", "h"), ("n_head", "a"), ("vocab_size", "V"), ("n_layer", "L")),
        env=env,
        name="layers",
        source="model.py:1",
        num_parameters=0,
        recipe=(("target", "cuda"), ("dtype", "bf16"), ("optimizer", "adamw"), ("attention", "sdpa")),
        versions=(("memir", "1"),),
        numbers=("E = 8: other operators run at other widths",),
        assumptions=(),
        traced_at=({"a": 5}, {"a": 7}),
        verified_at=({"a": 3, "B": 2},),
    )


@pytest.fixture(scope="module")
def derivation() -> Derivation:
    return Derivation(shown(step()), everywhere=True)


def test_the_head_size_is_written_by_the_others() -> None:
    over = shown(step())
    assert tuple(over.env.items()) == (("B", 2), ("S", 64), ("L", 4), ("h", 128), ("V", 1000), ("a", 4))
    assert "h <= 64*a" in over.program.domain
    assert conditions(over.program.domain) == ["L >= 3", "a >= 2", "8*a divides h", "h <= 64*a"]


def test_what_a_layer_keeps(derivation: Derivation) -> None:
    (part,) = derivation.quantity("layer").parts
    assert part.size is parse_size("2*B*S*h + 2*B*S^2*a")
    assert {term.size.text(): [p.row.origin for p in term.parts] for term in part.terms} == {
        "2*B*S^2*a": ["attention: bmm"],
        "2*B*S*h": ["up: mm"],
    }


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("parameters", "2*L*h^2 + 2*V*h"),
        ("gradients", "2*L*h^2"),
        ("states", "8*L*h^2 + 2*V*h"),
        ("steady", "6*L*h^2 + 2*V*h + 8*B*S"),
        ("activations", "2*B*S*L*h + 2*B*S*h + 2*B*S^2*L*a + 4*B*S*V"),
        ("logits", "8*B*S*V"),
        ("phase:optimizer", "8*L*h^2 + 6*h^2 + 2*V*h + 8*B*S"),
    ],
)
def test_quantities(derivation: Derivation, name: str, size: str) -> None:
    quantity = derivation.quantity(name)
    assert [part.size for part in quantity.parts] == [parse_size(size)]
    assert quantity.value == parse_size(size).evaluate(derivation.env)


def test_the_peak_has_pieces_with_a_place_and_terms_that_sum_to_them(derivation: Derivation) -> None:
    quantity = derivation.quantity("peak")
    assert {part.place.opcode for part in quantity.parts if part.place} == {
        "aten._foreach_sqrt",
        "aten._log_softmax_backward_data",
    }
    for part in quantity.parts:
        assert sum((term.size for term in part.terms), start=Size()) is part.size
    for env in ({"B": 1, "S": 1, "L": 9, "h": 640, "V": 7, "a": 10}, {"B": 3, "S": 500, "L": 3, "h": 16, "V": 5, "a": 2}):
        concrete = Derivation(shown(step(L=env["L"], a=env["a"], d=env["h"] // env["a"], V=env["V"])))
        pieces = concrete.quantity("peak").parts
        assert max(s.evaluate(env) for s in quantity.every) >= max(p.size.evaluate(env) for p in pieces)


def test_elements_are_bytes_by_the_width_of_the_type() -> None:
    elements = Derivation(shown(step()), elements=True)
    assert elements.quantity("parameters").parts[0].size is parse_size("L*h^2 + V*h")
    assert elements.quantity("logits").parts[0].size is parse_size("2*B*S*V")


def test_the_depth_may_be_a_number() -> None:
    found = Derivation(shown(step(), ("B", "S", "h", "a"))).quantity("parameters")
    assert found.parts[0].size is parse_size("8*h^2 + 2000*h")
    assert not any("L" in text for text in found.domain)


@pytest.mark.parametrize("name", ["peaks", "phase:decode"])
def test_a_quantity_that_there_is_not(derivation: Derivation, name: str) -> None:
    with pytest.raises(UsageError, match="--of: "):
        derivation.quantity(name)


def test_python_and_sympy_give_the_same_numbers(derivation: Derivation, tmp_path: Path) -> None:
    import sympy

    quantities = [derivation.quantity(name) for name in ("peak", "states")]
    module = tmp_path / "formula.py"
    text = to_python(derivation.shown, quantities, "bytes")
    assert "import" not in text
    module.write_text(text + "import json\nprint(json.dumps([peak(3, 129, 5, 96, 777, 3), states(3, 129, 5, 96, 777, 3)]))\n")
    out = subprocess.run([sys.executable, str(module)], capture_output=True, text=True, check=True).stdout.splitlines()
    env = {"B": 3, "S": 129, "L": 5, "h": 96, "V": 777, "a": 3}
    expected = [max(size.evaluate(env) for size in quantity.every) for quantity in quantities]
    assert json.loads(out[-1]) == expected
    assert out[0] == f"peak {quantities[0].value}"
    for line, number in zip(to_sympy_text(quantities).splitlines(), expected, strict=True):
        expression = sympy.sympify(line.partition(" = ")[2])
        assert expression.subs({symbol: env[symbol.name] for symbol in expression.free_symbols}) == number


def equations(latex: str) -> dict[str, str]:
    """The right side of each equation of the first align*, on one line."""
    inside = latex.partition(r"\begin{align*}")[2].partition(r"\end{align*}")[0]
    whole = re.sub(r"\\\\\s*&\\quad", " ", inside)
    return dict(line.removesuffix(r" \\").split(" &= ") for line in whole.strip().splitlines())


def test_the_latex_parses_to_the_formula(derivation: Derivation) -> None:
    from sympy.parsing.latex import parse_latex_lark

    quantity = derivation.quantity("peak")
    latex = to_latex(derivation.shown, [quantity], "bytes", standalone=True)
    env = {"B": 3, "S": 129, "L": 5, "h": 96, "V": 777, "a": 3}
    right = equations(latex)
    assert len(quantity.parts) == 2
    for number, part in enumerate(quantity.parts, 1):
        text = right[f"M_{{{number}}}"].replace(r"\,", r"\cdot").replace(r"\left", "").replace(r"\right", "")
        expression = parse_latex_lark(text)
        assert expression.subs({symbol: env[symbol.name] for symbol in expression.free_symbols}) == part.size.evaluate(env)
    assert latex.startswith(r"\documentclass{article}")
    assert latex.count(r"\begin{") == latex.count(r"\end{")
    assert latex.count("{") == latex.count("}")


def test_ceilings_and_divisors_in_every_style() -> None:
    size = 2 * Size.of("B") * ceil_div(Size.of("S") + 3, 128) * Size.of("h") * Size.of("a") ** -1 - floor_div(Size.of("h"), 2)
    env = {"B": 2, "S": 200, "h": 12, "a": 4}
    assert size_text(size, env, plain_style()) == "2*B*h*ceil((S + 3)/128)/a - floor(h/2)"
    latex = r"\frac{2\, B\, h\, \left\lceil \frac{3 + S}{128} \right\rceil}{a} - \left\lfloor \frac{h}{2} \right\rfloor"
    assert size_text(size, env, latex_style()) == latex
    assert eval(python_text(size), {}, env) == size.evaluate(env)
    assert sum((product.size for product in products(size, env)), start=Size()) is size


def test_one_depth_stands_together() -> None:
    size = parse_size("24*L*B*h - 10*B*h + 3*L^2 + L - 1")
    assert size_text(size, {"L": 2, "B": 1, "h": 1000}, plain_style()) == "(24*L - 10)*B*h + (3*L**2 + L - 1)"


def test_text_and_markdown_say_symbols_validity_and_numbers(derivation: Derivation) -> None:
    quantities = [derivation.quantity("layer"), derivation.quantity("peak")]
    text = to_text(derivation.shown, quantities, "bytes")
    assert "layer = 2*B*S**2*a + 2*B*S*h" in text
    assert "valid for: L >= 3, a >= 2, 8*a divides h, h <= 64*a, B >= 1, S >= 1, V >= 1" in text
    assert "stays a number: E = 8: other operators run at other widths" in text
    assert "a fresh trace at a=3, B=2 is the same to the byte" in text
    assert max(map(len, text.splitlines())) <= 160
    markdown = to_markdown(derivation.shown, quantities, "bytes")
    assert "| `2*B*S**2*a` | 2 attention: bmm |" in markdown


def test_the_largest_batch_and_its_closed_form(derivation: Derivation) -> None:
    quantity = derivation.quantity("peak")
    budget = 100 * 2**20
    found = solve(derivation.shown, quantity, "B", budget)
    assert found.value is not None
    assert found.over is not None
    at = [
        max(size.evaluate({**derivation.env, "B": value}) for size in quantity.every) for value in (found.value, found.over[0])
    ]
    assert at == [found.nbytes, found.over[1]]
    assert at[0] <= budget < at[1]
    text, fits = to_solution(derivation.shown, quantity, "B", budget, "100MiB")
    assert fits
    assert "B = floor((M - c0) / c1)" in text
    longest, _ = to_solution(derivation.shown, quantity, "S", budget, "100MiB")
    assert "S = floor((sqrt(c1**2 + 4*c2*(M - c0)) - c1) / (2*c2))" in longest
    assert "c2 = 8*B*a" in longest.replace("2*L*B*a", "8*B*a")


def test_a_width_is_solved_within_its_domain(derivation: Derivation) -> None:
    found = solve(derivation.shown, derivation.quantity("states"), "h", 2**20)
    assert found.value is not None
    assert found.value % 32 == 0  # 8*a divides h


def test_nothing_fits(derivation: Derivation) -> None:
    text, fits = to_solution(derivation.shown, derivation.quantity("states"), "L", 1000, "1000B")
    assert not fits
    assert "none fits" in text


def test_what_may_shrink_is_not_solved() -> None:
    text = LAYERS.replace("storage $root : 6*a^2*d^2", "storage $root : 6*a^2*d^2*B^-1")
    over = shown(step(text))
    with pytest.raises(InconclusiveError, match="may shrink as B grows"):
        solve(over, Derivation(over).quantity("states"), "B", 2**30)


def test_two_steps_differ_by_a_formula_and_new_growth_is_named(derivation: Derivation) -> None:
    flash = LAYERS.replace("$p[L] : 2*B*S^2*a", "$p[L] : 4*B*S*a").replace("bf16[B, a, S, S]", "f32[B, a, S]")
    other = Derivation(shown(step(flash)))
    text = to_difference(other, derivation, ["layer"], "bytes")
    assert "2*B*S**2*a - 4*B*S*a" in text
    assert "only the second grows with the square of the sequence length: 2*B*S**2*a (2 attention: bmm)" in text


def test_conditions_with_divisors_multiplied_out() -> None:
    tie = {"d": Size.of("h") * Size.of("a") ** -1}
    dims = ("h", "a")
    assert condition_with("d <= 128", tie, dims) == "h <= 128*a"
    assert condition_with("d % 8 == 0", tie, dims) == "8*a divides h"
    assert condition_with("S <= 8", tie, dims) == "S <= 8"
    assert condition_with("d >= 8", {"d": 64}, dims) == ""


ENGINE = next(filter(None, map(shutil.which, ("tectonic", "pdflatex"))), None)


@pytest.mark.skipif(ENGINE is None, reason="no TeX engine here: the LaTeX is parsed by sympy's grammar above")
def test_the_document_compiles(derivation: Derivation, tmp_path: Path) -> None:
    quantities = [derivation.quantity(name) for name in ("peak", "layer", "phase:optimizer")]
    (tmp_path / "formula.tex").write_text(to_latex(derivation.shown, quantities, "bytes", standalone=True))
    options = [] if "tectonic" in str(ENGINE) else ["-interaction=nonstopmode", "-halt-on-error"]
    done = subprocess.run([str(ENGINE), *options, "formula.tex"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "formula.pdf").stat().st_size > 1000
