"""Sizes to sympy and back, and as text that sympy reads. sympy is imported when it is needed, torch never."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from memir.ir.size import ONE, Gen, Monomial, Size, ceil_div, floor_div, max_of, min_of

if TYPE_CHECKING:
    import sympy

_CACHE_LIMIT = 100_000
_MAX_EXPONENT = 64  # of a sum
_MAX_BINARY = 1 << 20  # floats are taken as exact fractions with at most this denominator

Ratio = tuple[Size, Size]
_from_cache: dict[Any, Size] = {}


def to_sympy(size: Size) -> sympy.Expr:
    """The size as an expanded sympy expression over `Symbol(name, integer=True, positive=True)`."""
    import sympy

    def atom(of: str | Gen) -> Any:
        if isinstance(of, str):
            return sympy.Symbol(of, integer=True, positive=True)
        a, b = to_sympy(of.a), to_sympy(of.b)
        if of.op in ("max", "min"):
            return (sympy.Max if of.op == "max" else sympy.Min)(a, b)
        if of.op == "pow2":
            return 2 ** sympy.ceiling(sympy.log(a, 2))
        return (sympy.ceiling if of.op == "ceil" else sympy.floor)(sympy.expand(a / b))

    terms = []
    for monomial, coefficient in size.terms:
        factors = [atom(a) ** e for a, e in monomial]
        terms.append(sympy.Mul(sympy.Integer(coefficient), *factors))
    return sympy.Add(*terms)


def from_sympy(expr: sympy.Expr) -> Size:
    """The size that an expression over integer symbols is; also with the functions that torch's symbolic integers use.

    Symbols go by their name, whatever their assumptions, and stand for positive integers. ValueError names the part that is no
    size: a fraction outside of floor and ceiling, a division by a sum, a function without integer meaning.
    """
    found = _from_cache.get(expr)
    if found is None:
        if len(_from_cache) >= _CACHE_LIMIT:
            _from_cache.clear()
        found = _from_cache[expr] = _size(expr)
    return found


def formula_text(size: Size, order: Sequence[str] = ("B", "S", "L")) -> str:
    """The size as text for sympy and Python: `128*B*S + 4*ceiling(S/64)`, `Max(a, b)`, `S**2`, `B*S/t`.

    Read it with `sympy.sympify(text, locals={"B": B, "S": S})`: without locals a bare S is sympy's own registry.
    """
    if not size.terms:
        return "0"
    by_text = {Size(((m, 1),)).text(order): (m, c) for m, c in size.terms}
    ordered = [by_text[text] for text in sorted(by_text, key=lambda t: _position(by_text[t][0], order))]
    text = "".join(f" {'-' if c < 0 else '+'} {_term_text(m, abs(c), order)}" for m, c in ordered)
    return "-" + text[3:] if text.startswith(" - ") else text[3:]


def _position(monomial: Monomial, order: Sequence[str]) -> tuple[Any, ...]:
    """Highest degree first, then as the symbols are ordered, as `Size.text` has it."""
    rank = {name: place for place, name in enumerate(order)}
    factors = [
        (1, len(rank), a.text(order), -e) if isinstance(a, Gen) else (0, rank.get(a, len(rank)), a, -e) for a, e in monomial
    ]
    return (-sum(e for _, e in monomial), sorted(factors))


def _term_text(monomial: Monomial, coefficient: int, order: Sequence[str]) -> str:
    rank = {name: place for place, name in enumerate(order)}
    factors = sorted(
        monomial, key=lambda f: (isinstance(f[0], Gen), rank.get(f[0], len(rank)) if isinstance(f[0], str) else 0, str(f[0]))
    )
    top = [_power_text(a, e, order) for a, e in factors if e > 0]
    bottom = [_power_text(a, -e, order) for a, e in factors if e < 0]
    if coefficient != 1 or not top:
        top.insert(0, str(coefficient))
    return "*".join(top) + "".join(f"/{factor}" for factor in bottom)


def _power_text(atom: str | Gen, exponent: int, order: Sequence[str]) -> str:
    return (atom if isinstance(atom, str) else _gen_text(atom, order)) + ("" if exponent == 1 else f"**{exponent}")


def _gen_text(gen: Gen, order: Sequence[str]) -> str:
    a, b = formula_text(gen.a, order), formula_text(gen.b, order)
    if gen.op in ("max", "min"):
        return f"{gen.op.capitalize()}({a}, {b})"
    if gen.op == "pow2":
        return f"2**ceiling(log({a}, 2))"
    numerator = a if len(gen.a.terms) == 1 else f"({a})"
    return f"{'ceiling' if gen.op == 'ceil' else 'floor'}({numerator}/{b if b.isalnum() else f'({b})'})"


def _size(expr: Any) -> Size:
    """The whole value of an expression."""
    top, bottom = _ratio(expr)
    whole = _divided(top, bottom)
    if whole is None:
        parts = expr.args if type(expr).__name__ == "Add" else (expr,)
        culprit = next((part for part in parts if _divided(*_ratio(part)) is None), expr)
        raise ValueError(f"{culprit} is not a whole number of anything" + (f" in {expr}" if culprit is not expr else ""))
    return whole


def _divided(top: Size, bottom: Size) -> Size | None:
    """top/bottom where it is an integer polynomial over symbols and their inverses."""
    if len(bottom.terms) != 1:
        return None
    monomial, coefficient = bottom.terms[0]
    if any(c % coefficient for _, c in top.terms):
        return None
    return top.exact_div(coefficient) * Size(((monomial, 1),)) ** -1


def _ratio(expr: Any) -> Ratio:
    kind = type(expr).__name__
    handler = _HANDLERS.get(kind)
    if handler:
        return handler(expr)
    if getattr(expr, "is_Symbol", False):
        return Size.of(str(expr.name)), ONE
    if getattr(expr, "is_Rational", False):
        return Size.of(int(expr.p)), Size.of(int(expr.q))
    if getattr(expr, "is_Float", False):
        value = Fraction(float(expr))
        if value.denominator <= _MAX_BINARY:
            return Size.of(value.numerator), Size.of(value.denominator)
    if isinstance(expr, int):
        return Size.of(expr), ONE
    raise ValueError(f"{expr} is not a size")


def _add(expr: Any) -> Ratio:
    parts = [_ratio(a) for a in expr.args]
    bottom = ONE
    for _, d in parts:
        if d is not bottom and d is not ONE:
            bottom = d if bottom is ONE else bottom * d
    total: dict[Monomial, int] = {}
    for n, d in parts:
        scaled = n if d is bottom else n * _without(bottom, d)
        for monomial, coefficient in scaled.terms:
            total[monomial] = total.get(monomial, 0) + coefficient
    return Size(total.items()), bottom


def _without(product: Size, factor: Size) -> Size:
    """product/factor for a factor that went into the product."""
    quotient = floor_div(product, factor)
    if quotient * factor is not product:
        raise ValueError(f"cannot add over the denominators of {product}")
    return quotient


def _mul(expr: Any) -> Ratio:
    top = bottom = ONE
    for a in expr.args:
        n, d = _ratio(a)
        top, bottom = top * n, bottom * d if d is not ONE else bottom
    return top, bottom


def _pow(expr: Any) -> Ratio:
    base, exponent = expr.args
    if not getattr(exponent, "is_Integer", False):
        raise ValueError(f"{expr} has an exponent that is not a whole number")
    top, bottom = _ratio(base)
    power = int(exponent)
    if len(top.terms) != 1 and abs(power) > _MAX_EXPONENT:
        raise ValueError(f"{expr} has too large an exponent")
    return (top**power, bottom**power) if power >= 0 else (bottom**-power, top**-power)


def _quotient(expr: Any) -> Ratio:
    """a/b of two arguments."""
    (n1, d1), (n2, d2) = (_ratio(a) for a in expr.args)
    if not n2.terms:
        raise ValueError(f"{expr} divides by zero")
    return n1 * d2, d1 * n2


def _floored(ratio: Ratio) -> Ratio:
    return floor_div(*ratio), ONE


def _mod(expr: Any) -> Ratio:
    """a mod b = a - b*floor(a/b), with b's sign, as Python and sympy have it."""
    a, b = (_size(x) for x in expr.args)
    if not b.terms:
        raise ValueError(f"{expr} divides by zero")
    return a - b * floor_div(a, b), ONE


def _modular_indexing(expr: Any) -> Ratio:
    """torch's ModularIndexing(a, b, m) = floor(a/b) mod m."""
    a, b, m = (_size(x) for x in expr.args)
    quotient = floor_div(a, b)
    return quotient - m * floor_div(quotient, m), ONE


def _truncated(expr: Any) -> Ratio:
    """Towards zero, which is floor where the value is known not to be negative."""
    top, bottom = _ratio(expr.args[0])
    if not (top.is_nonnegative and bottom.is_nonnegative):
        raise ValueError(f"{expr} may be negative")
    return floor_div(top, bottom), ONE


def _extremum(choose: Callable[[Size | int, Size | int], Size]) -> Callable[[Any], Ratio]:
    def convert(expr: Any) -> Ratio:
        result, *others = (_size(a) for a in expr.args)
        for other in others:
            result = choose(result, other)
        return result, ONE

    return convert


# By class name: sympy's own, and those of torch/utils/_sympy/functions.py, which says what each means.
_HANDLERS: dict[str, Callable[[Any], Ratio]] = {
    "Add": _add,
    "Mul": _mul,
    "Pow": _pow,
    "PowByNatural": _pow,
    "floor": lambda e: _floored(_ratio(e.args[0])),
    "ceiling": lambda e: (ceil_div(*_ratio(e.args[0])), ONE),
    "FloorToInt": lambda e: _floored(_ratio(e.args[0])),
    "CeilToInt": lambda e: (ceil_div(*_ratio(e.args[0])), ONE),
    "TruncToInt": _truncated,
    "FloorDiv": lambda e: _floored(_quotient(e)),
    "CleanDiv": lambda e: _floored(_quotient(e)),
    "CeilDiv": lambda e: (ceil_div(*_quotient(e)), ONE),
    "IntTrueDiv": _quotient,
    "FloatTrueDiv": _quotient,
    "ToFloat": lambda e: _ratio(e.args[0]),
    "Identity": lambda e: _ratio(e.args[0]),
    "Mod": _mod,
    "PythonMod": _mod,
    "ModularIndexing": _modular_indexing,
    "Max": _extremum(max_of),
    "Min": _extremum(min_of),
}
