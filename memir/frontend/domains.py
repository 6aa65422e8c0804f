"""The guards that tracing left as the program's domain: conditions over B and S for people and for `memir.ir.domain`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from math import ceil, floor, gcd
from typing import Any

import numpy as np
import sympy

from memir.frontend.fake import Fake
from memir.frontend.symbols import LEAST, never_negative
from memir.ir.domain import Condition
from memir.ir.symbolic import from_sympy

_REACH = 8192  # a set of lengths that no condition spells is looked through so far
_BATCHES = (2, 3, 4, 5, 7, 8, 16, 31, 64, 256)


def domain_of(fake: Fake) -> tuple[str, ...]:
    """The guards that tracing left, as conditions over B and S such as `S <= 1024`, without those that always hold."""
    lowest = dict.fromkeys(fake.names.values(), LEAST)
    plain: list[Any] = []
    tangled: list[Any] = []
    for guard in _guards(fake):
        (plain if _is_plain(guard) else tangled).append(guard)
    return conditions_of(plain, lowest, _as_a_set(tangled, fake))


def _is_plain(relation: Any) -> bool:
    """Whether a condition says it well: a bound or an exception of one symbol, or a remainder of one by a number."""
    condition = Condition.read(_condition(relation))
    if condition is None or not condition.symbols():
        return not _condition(relation)
    return (
        len(relation.free_symbols) == 1
        and all(isinstance(atom, str) for monomial, _ in condition.left.terms for atom, _ in monomial)
        and condition.modulus.is_constant
    )


def broken_at(fake: Fake, point: Mapping[str, int]) -> set[str]:
    """The symbols in guards that do not hold at a point, and those with a value that no symbol stands for."""
    broken = {name for name in fake.names.values() if point[name] < LEAST}
    if broken:
        return broken
    for guard in _guards(fake):
        if not bool(_compiled(guard)(point["B"], point["S"])):
            broken |= {str(symbol) for symbol in guard.free_symbols}
    return broken


def _guards(fake: Fake) -> list[Any]:
    names = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in fake.names.items()}
    found = [guard.expr.xreplace(names) for guard in fake.shape_env.guards]
    return [relation for relation in dict.fromkeys(found) if getattr(relation, "free_symbols", None)]


def _as_a_set(relations: Sequence[Any], fake: Fake) -> list[str]:
    """Relations that say little by themselves (padding to a multiple of S % 64 and the like), as the lengths where all hold:
    bounds and a remainder of S. Those that hold for all lengths and batches looked through (up to 8,192 and 256) are left out;
    where some do not, the conditions reach as far as was looked.
    """
    if not relations or "S" not in fake.names.values():
        return [str(relation) for relation in relations]
    values = getattr(fake.shape_env, "backed_var_to_val", None) or fake.shape_env.var_to_val  # the name before torch 2.10
    hint = next(int(values[symbol]) for symbol, name in fake.names.items() if name == "S")
    reach = max(_REACH, 2 * hint)
    lengths = np.arange(LEAST, reach + 1, dtype=np.int64)
    holds = np.ones(lengths.shape, dtype=bool)
    said: list[str] = []
    for relation in relations:
        test = _compiled(relation)
        by_batch = [_everywhere(test, batch, lengths) for batch in _BATCHES]
        if all((found == by_batch[0]).all() for found in by_batch):
            holds &= by_batch[0]
        else:  # it depends on B too
            said.append(_condition(relation))
    valid = lengths[holds]
    if hint not in valid:
        return [_condition(relation) for relation in relations]
    if len(valid) == len(lengths):
        return said
    step, first, last = _progression(valid.tolist(), hint)
    said += [f"S % {step} == {hint % step}"] if step > 1 else []
    said += [f"S >= {first}"] if first > LEAST + step - 1 else []
    return [*said, f"S <= {last}"]


def _everywhere(test: Callable[[int, Any], Any], batch: int, lengths: Any) -> Any:
    """The truth of a relation at each length."""
    try:
        return np.broadcast_to(test(batch, lengths), lengths.shape)
    except ValueError:  # a relation that cannot be computed for all lengths at once: cases, `and`
        return np.fromiter((bool(test(batch, int(length))) for length in lengths), dtype=bool, count=len(lengths))


def _progression(valid: list[int], hint: int) -> tuple[int, int, int]:
    """The longest run of equally spaced numbers around `hint`: its step, first and last."""
    at = valid.index(hint)
    gaps = [b - a for a, b in zip(valid[max(at - 1, 0) : at + 1], valid[max(at - 1, 0) + 1 : at + 2], strict=False)]
    step = min(gaps, default=1)
    members = set(valid)
    first = last = hint
    while first - step in members and not any(n in members for n in range(first - step + 1, first)):
        first -= step
    while last + step in members and not any(n in members for n in range(last + 1, last + step)):
        last += step
    return step, first, last


def _compiled(relation: Any) -> Callable[[int, Any], Any]:
    """The relation as a function of B and an array of S; torch's integer functions are numpy's."""
    for kind, combine in ((sympy.Or, np.logical_or), (sympy.And, np.logical_and)):
        if isinstance(relation, kind):
            parts = [_compiled(part) for part in relation.args]
            return lambda batch, lengths: reduce(combine, [part(batch, lengths) for part in parts])
    symbols = [sympy.Symbol(name, integer=True, positive=True) for name in ("B", "S")]
    remainder = sympy.Function("remainder")  # sympy prints a % b without the parentheses that torch's Mod needs
    named = relation.replace(lambda e: type(e).__name__ in ("Mod", "PythonMod"), lambda e: remainder(*e.args))
    compiled: Callable[[int, Any], Any] = sympy.lambdify(symbols, named, modules=[_NUMPY])
    return compiled


_NUMPY: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "remainder": lambda a, b: a % b,
    **dict.fromkeys(("max", "Max"), lambda *values: reduce(np.maximum, values)),
    **dict.fromkeys(("min", "Min"), lambda *values: reduce(np.minimum, values)),
}


def conditions_of(guards: Iterable[Any], lowest: Mapping[str, int], further: Sequence[str] = ()) -> tuple[str, ...]:
    """Relations over B and S as conditions that `memir.ir.domain` reads; `lowest` are values that no symbol goes below."""
    relations = [r for r in map(_without_factors, guards) if r not in (sympy.true, True)]
    lowest = dict(lowest)
    exceptions = {text for text in map(_condition, relations) if " != " in text}
    for name in lowest:
        while f"{name} != {lowest[name]}" in exceptions:
            lowest[name] += 1
    conditions = [_condition(relation) for relation in relations if not _always_holds(relation, lowest)]
    bounds = [f"{name} >= {value}" for name, value in lowest.items()]
    return tuple(_tightest([*bounds, *(text for text in dict.fromkeys(conditions) if text), *further]))


def _without_factors(relation: Any) -> Any:
    """`B*S - 2*B != 0` is `S - 2 != 0`: factors that are at least 1 go."""
    if not isinstance(relation, sympy.Ne) or relation.atoms(sympy.Mod) or not relation.lhs.is_polynomial():
        return relation
    factors = [f for f, _ in sympy.factor_list(relation.lhs - relation.rhs)[1] if not never_negative(f - 1, {})]
    return sympy.Ne(sympy.Mul(*factors), 0) if factors else sympy.true


def _always_holds(relation: Any, lowest: Mapping[str, int]) -> bool:
    """Whether `a % m != 0` has 0 < a < m, or `a != b` has a < b or a > b, everywhere at and above `lowest`."""
    if not isinstance(relation, sympy.Ne):
        return False
    if type(relation.lhs).__name__ in ("Mod", "PythonMod"):
        value, modulus = relation.lhs.args
        return relation.rhs == 0 and never_negative(value - 1, lowest) and never_negative(modulus - value - 1, lowest)
    difference = relation.lhs - relation.rhs
    return never_negative(difference - 1, lowest) or never_negative(-difference - 1, lowest)


_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}


def _condition(expr: Any) -> str:
    """A relation as `memir.ir.domain` reads it, a number on the right where that is possible; "" if it says nothing."""
    if not isinstance(expr, sympy.core.relational.Relational):
        return str(expr)
    for side, other in ((expr.lhs, expr.rhs), (expr.rhs, expr.lhs)):
        if type(side).__name__ in ("Mod", "PythonMod") and other.is_number and expr.rel_op in ("==", "!="):
            value, modulus = side.args
            return f"{_text(value)} % {_text(modulus)} {expr.rel_op} {other}"
    difference = from_sympy(sympy.expand(expr.lhs - expr.rhs))
    constant = difference.constant
    rest = difference - constant
    if rest.is_constant:
        return ""
    operation, content = expr.rel_op, gcd(*(c for _, c in rest.terms))
    if next(c for _, c in rest.terms) < 0:
        operation, content = _FLIP[operation], -content
    rest, bound = rest.exact_div(content), Fraction(-constant, content)
    if operation in ("<", ">"):  # integers: a strict bound is the next closed one
        bound = Fraction(ceil(bound) - 1 if operation == "<" else floor(bound) + 1)
        operation += "="
    if operation in ("<=", ">="):
        bound = Fraction(floor(bound) if operation == "<=" else ceil(bound))
    if bound.denominator != 1:
        return "" if operation == "!=" else f"{(rest * bound.denominator).text(('B', 'S'))} {operation} {bound.numerator}"
    return f"{rest.text(('B', 'S'))} {operation} {bound}"


def _text(expr: sympy.Expr) -> str:
    size = from_sympy(sympy.expand(expr))
    return size.text(("B", "S")) if len(size.terms) < 2 else f"({size.text(('B', 'S'))})"


def _tightest(conditions: list[str]) -> list[str]:
    """Of the bounds on one symbol only the tightest; what says nothing is left out."""
    best: dict[tuple[str, str], int] = {}
    others: list[str] = []
    for text in conditions:
        left, _, rest = text.partition(" ")
        operation, _, right = rest.partition(" ")
        if left.isidentifier() and operation in ("<=", ">=") and right.lstrip("-").isdigit():
            bound = int(right)
            if (left, operation) not in best:
                best[left, operation] = bound
            best[left, operation] = (min if operation == "<=" else max)(best[left, operation], bound)
        elif left.isidentifier() and operation == "!=" and right.lstrip("-").isdigit() and int(right) < LEAST:
            continue
        else:
            others.append(text)
    bounds = [f"{left} {operation} {bound}" for (left, operation), bound in best.items() if bound < 2**62]
    return bounds + sorted(others)
