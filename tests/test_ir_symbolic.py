"""Sizes and sympy: there and back, formulas as text, and what torch's symbolic integers are made of."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import sympy
from hypothesis import given

from memir.ir.size import Size
from memir.ir.sizetext import parse_size
from memir.ir.symbolic import formula_text, from_sympy, to_sympy
from tests.strategies import SYMBOLS, environments, polynomials, shards, sizes

LOCALS = {name: sympy.Symbol(name, integer=True, positive=True) for name in (*SYMBOLS, "t")}
N = sympy.Symbol("s0", integer=True, positive=True)


@given(polynomials())
def test_polynomials_there_and_back(size: Size) -> None:
    assert from_sympy(to_sympy(size)) is size


@given(shards())
def test_shards_there_and_back(size: Size) -> None:
    assert from_sympy(to_sympy(size)) is size


@given(sizes(), environments)
def test_any_size_there_and_back(size: Size, env: dict[str, int]) -> None:
    """sympy may simplify what it knows of positive integers, so the value is compared, and a second time changes nothing."""
    back = from_sympy(to_sympy(size))
    assert back.evaluate(env) == size.evaluate(env)
    assert from_sympy(to_sympy(back)).evaluate(env) == size.evaluate(env)


@given(sizes(), environments)
def test_formulas_are_read_by_sympy_and_evaluate_exactly(size: Size, env: dict[str, int]) -> None:
    expr = sympy.sympify(formula_text(size), locals=LOCALS)
    values = {LOCALS[name]: number for name, number in env.items()}
    # All at once: one after the other, sympy 1.14 makes ceiling(Min(0, S*L - L**2)/B) at B=10, S=1, L=2 minus a fifth.
    assert expr.subs(values, simultaneous=True) == size.evaluate(env)


@pytest.mark.parametrize(
    ("size", "formula"),
    [
        ("0", "0"),
        ("-3", "-3"),
        ("128*B*S + 4*ceil(S/64)", "128*B*S + 4*ceiling(S/64)"),
        ("B^2*S - 8", "B**2*S - 8"),
        ("-B*S + 2*B^3", "2*B**3 - B*S"),
        ("4*B*S*t^-1 + 3*t^-2", "4*B*S/t + 3/t**2"),
        ("ceil((B*S + 3)/(64*t))", "ceiling((B*S + 3)/(64*t))"),
        ("max(B, min(S, 4))^2*B", "B*Max(B, Min(S, 4))**2"),
        ("floor(S/3)", "floor(S/3)"),
    ],
)
def test_formulas(size: str, formula: str) -> None:
    assert formula_text(parse_size(size)) == formula


def test_the_order_of_symbols_is_the_callers() -> None:
    assert formula_text(parse_size("B*S + S + B"), ("S", "B")) == "S*B + S + B"


@pytest.mark.parametrize(
    ("expr", "named"),
    [
        ("S/2 + B", "S/2 is not a whole number of anything in B \\+ S/2"),
        ("S*(S - 1)/2", "is not a whole number of anything"),
        ("1/(S + 1)", "1/\\(S \\+ 1\\) is not a whole number"),
        ("sqrt(S)", "sqrt\\(S\\) has an exponent"),
        ("sin(S)", "sin\\(S\\) is not a size"),
        ("B + pi", "pi is not a size"),
        ("0.1*S", "0.1\\d* is not a size"),
        ("(S + 1)**999", "too large an exponent"),
    ],
)
def test_what_is_no_size_is_named(expr: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        from_sympy(sympy.sympify(expr, locals=LOCALS))


def test_symbols_go_by_name() -> None:
    assert from_sympy(sympy.Symbol("B") * sympy.Symbol("S", integer=True)) is parse_size("B*S")


def _torch_cases() -> list[tuple[Any, str]]:
    functions = pytest.importorskip("torch.utils._sympy.functions")
    three = sympy.Integer(3)
    return [
        (functions.FloorDiv(N, 2), "floor(s0/2)"),
        (functions.CeilDiv(N, 2), "ceil(s0/2)"),
        (functions.CleanDiv(4 * N, 8), "floor(s0/2)"),
        (functions.Mod(N, 64), "s0 - 64*floor(s0/64)"),
        (functions.PythonMod(N, 64), "s0 - 64*floor(s0/64)"),
        (functions.Max(N, 4), "max(s0, 4)"),
        (functions.Min(N, 4), "min(s0, 4)"),
        (functions.CeilToInt(functions.IntTrueDiv(N, three)), "ceil(s0/3)"),
        (functions.FloorToInt(functions.ToFloat(N) * 0.5), "floor(s0/2)"),
        (functions.TruncToInt(functions.IntTrueDiv(N, three)), "floor(s0/3)"),
        (functions.ModularIndexing(N, 2, 3), "floor(s0/2) - 3*floor(s0/6)"),
        (functions.PowByNatural(N + 1, 2), "s0^2 + 2*s0 + 1"),
        (functions.FloorDiv(N + 63, 64) * 64, "64*ceil(s0/64)"),
    ]


def test_torchs_functions() -> None:
    for expr, size in _torch_cases():
        assert from_sympy(expr) is parse_size(size), expr


def test_truncation_of_what_may_be_negative_is_refused() -> None:
    functions = pytest.importorskip("torch.utils._sympy.functions")
    with pytest.raises(ValueError, match="may be negative"):
        from_sympy(functions.TruncToInt(functions.IntTrueDiv(N - 7, sympy.Integer(2))))


def test_sympy_is_imported_only_when_it_is_needed() -> None:
    code = "import sys, memir.ir.symbolic as s; s.formula_text(s.Size.of('B')); print(*{'sympy', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
