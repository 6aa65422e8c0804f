"""Reading sizes: `128*B*S + 4*ceil(S/64)`. The grammar is in docs/ir.md; `Size.text` writes it."""

from __future__ import annotations

import re
from typing import NoReturn

from memir.ir.cursor import Cursor
from memir.ir.size import ONE, Size, ceil_div, floor_div, max_of, min_of, pow2_of

IDENTIFIER = re.compile(r"[ \t]*([^\W\d]\w*)")
_NUMBER = re.compile(r"[ \t]*(\d+)")
_EXPONENT = re.compile(r"[ \t]*(-?\d+)")
_MAX_DEPTH = 60  # of parentheses
_MAX_EXPONENT = 4096  # of what is not a symbol
_MAX_DIGITS = 4000

# A size without parentheses, whole: the atomic group keeps it from ending inside a longer one.
_FACTOR = r"(?:\d+|[^\W\d]\w*)(?:[ \t]*\^[ \t]*-?\d+)?"
_FLAT = re.compile(rf"[ \t]*((?>-?[ \t]*{_FACTOR}(?:[ \t]*[-+*][ \t]*{_FACTOR})*))(?![ \t]*[-+*/^(])")
_GROUP = re.compile(r"\[([^\[\]]*)\]")

_sizes: dict[str, Size] = {}
_groups: dict[str, tuple[Size, ...]] = {}

Ratio = tuple[Size, Size]


def parse_size(text: str) -> Size:
    """The size that `text` spells, whole; ParseError with the column otherwise."""
    cursor = Cursor(text)
    size = read_size(cursor)
    cursor.end("an operator or the end of the size")
    return size


def read_size(cursor: Cursor) -> Size:
    """The longest size that begins at the cursor."""
    flat = _FLAT.match(cursor.text, cursor.position)
    if flat is None:
        start = cursor.skip_blank()
        return _whole(_sum(cursor, 0), cursor, start)
    found = _sizes.get(flat.group(1))
    if found is None:
        start = cursor.skip_blank()
        found = _whole(_sum(cursor, 0), cursor, start)
        _sizes[flat.group(1)] = found
    cursor.position = flat.end()
    return found


def read_group(cursor: Cursor) -> tuple[Size, ...]:
    """Sizes in brackets: `[B, S, 64]`."""
    cursor.skip_blank()
    match = _GROUP.match(cursor.text, cursor.position)
    found = _groups.get(match.group(1)) if match else None
    if match and found is not None:
        cursor.position = match.end()
        return found
    cursor.expect("[")
    sizes: list[Size] = []
    if not cursor.sign("]"):
        sizes.append(read_size(cursor))
        while cursor.sign(","):
            sizes.append(read_size(cursor))
        if not cursor.sign("]"):
            cursor.fail("expected `,`, `]` or an operator")
    if match:
        _groups[match.group(1)] = tuple(sizes)
    return tuple(sizes)


def _whole(ratio: Ratio, cursor: Cursor, start: int) -> Size:
    """A quotient outside ceil and floor: by a number that divides it, or by symbols (`B*S/t` is `B*S*t^-1`)."""
    numerator, denominator = ratio
    monomial, coefficient = denominator.terms[0]
    if len(denominator.terms) > 1 or any(c % coefficient for _, c in numerator.terms):
        cursor.fail(
            f"{denominator} does not divide {numerator}",
            at=start,
            hint=f"write  ceil(({numerator})/({denominator}))  or  floor(...)",
        )
    return numerator.exact_div(coefficient) * Size(((monomial, 1),)) ** -1


def _sum(cursor: Cursor, depth: int) -> Ratio:
    negative = cursor.sign("-")
    top, bottom = _product(cursor, depth)
    total = (-top, bottom) if negative else (top, bottom)
    while True:
        if cursor.sign("+"):
            factor = 1
        elif cursor.sign("-"):
            factor = -1
        else:
            return total
        top, bottom = _product(cursor, depth)
        if bottom is total[1]:
            total = (total[0] + top * factor, bottom)
        else:
            total = (total[0] * bottom + top * total[1] * factor, total[1] * bottom)


def _product(cursor: Cursor, depth: int) -> Ratio:
    top, bottom = _power(cursor, depth)
    while True:
        if not cursor.text.startswith("**", cursor.skip_blank()) and cursor.sign("*"):
            n, d = _power(cursor, depth)
        elif cursor.sign("/"):
            at = cursor.skip_blank()
            d, n = _power(cursor, depth)
            if not d.terms:
                cursor.fail("division by zero", at=at)
        else:
            return top, bottom
        top, bottom = top * n, bottom * d


def _power(cursor: Cursor, depth: int) -> Ratio:
    start = cursor.skip_blank()
    top, bottom = _atom(cursor, depth)
    if not (cursor.sign("^") or cursor.sign("**")):
        return top, bottom
    exponent = _integer(cursor, _EXPONENT, "a whole exponent")
    symbol = len(top.terms) == 1 and top.terms[0][1] == 1 and bottom is ONE
    if abs(exponent) > _MAX_EXPONENT and not symbol:
        cursor.fail(f"the exponent {exponent} is too large", at=start)
    if exponent >= 0:
        return top**exponent, bottom**exponent
    if symbol:
        return top**exponent, ONE
    if not top.terms:
        cursor.fail("division by zero", at=start)
    return bottom**-exponent, top**-exponent


def _atom(cursor: Cursor, depth: int) -> Ratio:
    if depth > _MAX_DEPTH:
        cursor.fail(f"more than {_MAX_DEPTH} parentheses within each other")
    if cursor.sign("("):
        ratio = _sum(cursor, depth + 1)
        _close(cursor)
        return ratio
    if _NUMBER.match(cursor.text, cursor.position):
        return Size.of(_integer(cursor, _NUMBER, "a number")), ONE
    start = cursor.skip_blank()
    symbol = cursor.take(IDENTIFIER, "a size: a number, a symbol, ceil(a/b), floor(a/b), max(a, b), min(a, b), pow2(a) or `(`")
    if cursor.sign("("):
        return _call(cursor, symbol, start, depth + 1), ONE
    return Size.of(symbol), ONE


def _call(cursor: Cursor, function: str, start: int, depth: int) -> Size:
    if function in ("ceil", "floor"):
        top, bottom = _sum(cursor, depth)
        _close(cursor)
        return ceil_div(top, bottom) if function == "ceil" else floor_div(top, bottom)
    if function == "pow2":
        at = cursor.skip_blank()
        power = pow2_of(_whole(_sum(cursor, depth), cursor, at))
        _close(cursor)
        return power
    if function not in ("max", "min"):
        _unknown(cursor, function, start)
    at = cursor.skip_blank()
    result = _whole(_sum(cursor, depth), cursor, at)
    while cursor.sign(","):
        at = cursor.skip_blank()
        argument = _whole(_sum(cursor, depth), cursor, at)
        result = max_of(result, argument) if function == "max" else min_of(result, argument)
    _close(cursor)
    return result


def _unknown(cursor: Cursor, function: str, start: int) -> NoReturn:
    cursor.fail(f"unknown function `{function}`", at=start, hint="known: ceil, floor, max, min, pow2")


def _close(cursor: Cursor) -> None:
    if not cursor.sign(")"):
        cursor.fail("expected `)` or an operator")


def _integer(cursor: Cursor, pattern: re.Pattern[str], expected: str) -> int:
    start = cursor.skip_blank()
    digits = cursor.take(pattern, expected)
    if len(digits) > _MAX_DIGITS:
        cursor.fail(f"a number of {len(digits)} digits", at=start)
    return int(digits)
