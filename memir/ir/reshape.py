"""Which dimension of a tensor is which of its view: reshapes, transposes, slices and broadcasts read off shapes and strides.

Operators of the IR carry no arguments; shapes, strides and offsets of operand and result say what a view did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from memir.ir.core import Value
from memir.ir.size import ONE, ZERO, Size


@dataclass(frozen=True, slots=True)
class Part:
    """A dimension of a tensor, or the part of it that is left when `outer` times something else lies outside.

    [B*S] with S as the part is (0, B); [3*D], three tensors beside one another of which each is divided, is (d, 3).
    """

    dim: int
    outer: Size = ONE


@lru_cache(maxsize=65536)
def quotient(size: Size, by: Size) -> Size | None:
    """size / by where it is a polynomial with whole coefficients and no negative exponents; None otherwise."""
    if size == by:
        return ONE
    if len(by.terms) != 1:
        return None
    (monomial, coefficient), exponents = by.terms[0], dict(by.terms[0][0])
    terms = []
    for own, factor in size.terms:
        have = dict(own)
        if factor % coefficient or any(have.get(atom, 0) < e for atom, e in monomial):
            return None
        rest = Size(((own, factor // coefficient),))
        inverse = Size(((tuple((atom, -e) for atom, e in exponents.items()), 1),)) if exponents else ONE
        terms.append(rest * inverse)
    total = ZERO
    for term in terms:
        total = total + term
    return total


def reshaped(part: Part, before: Sequence[Size], after: Sequence[Size]) -> Part | None:
    """The part in another shape of the same elements; None where it is no part there (it is split within)."""
    for old, new in _groups(before, after):
        if part.dim not in old:
            continue
        outside = part.outer
        for dim in old:
            if dim == part.dim:
                break
            outside = outside * before[dim]
        return _within(outside, new, after)
    return None


def _within(outside: Size, dims: Sequence[int], shape: Sequence[Size]) -> Part | None:
    """The dimension of a group in which `outside` elements lie outside of the part; the last one of extent 1 does not count."""
    prefix = ONE
    found: Part | None = None
    for dim in dims:
        rest = quotient(outside, prefix)
        if rest is not None and shape[dim] is not ONE:
            if rest is ONE:
                return Part(dim)
            if quotient(shape[dim], rest) is not None and quotient(shape[dim], rest) is not ONE:
                found = Part(dim, rest)
        prefix = prefix * shape[dim]
    return found


def _groups(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of both shapes that hold the same elements, smallest groups first to last."""
    groups: list[tuple[list[int], list[int]]] = []
    old: list[int] = []
    new: list[int] = []
    left = right = ONE
    i = j = 0
    while i < len(before) or j < len(after):
        if not old and not new and i < len(before) and j < len(after) and before[i] == after[j]:
            groups.append(([i], [j]))
            i, j = i + 1, j + 1
            continue
        take_left = j >= len(after) or (i < len(before) and (not old or _smaller(left, right)))
        if take_left and i < len(before):
            left = left * before[i]
            old.append(i)
            i += 1
        else:
            right = right * after[j]
            new.append(j)
            j += 1
        if old and new and left == right:
            groups.append((old, new))
            old, new, left, right = [], [], ONE, ONE
    if old or new:
        groups.append((old, new))
    return groups


def _smaller(a: Size, b: Size) -> bool:
    """Whether a product is a proper divisor of the other, or has not begun."""
    rest = quotient(b, a)
    return rest is not None and rest is not ONE


def permuted(before: Value, after: Value) -> tuple[int, ...] | None:
    """For each dimension of the result the operand's, of a transpose or permutation; None where it is neither."""
    count = len(before.shape)
    if len(after.shape) != count:
        return None
    swaps = [tuple(range(count))] if count < 2 else []
    for i in range(count):
        for j in range(i + 1, count):
            order = list(range(count))
            order[i], order[j] = j, i
            swaps.append(tuple(order))
    for swapped in [*swaps, tuple(reversed(range(count)))]:
        if _is_order(before, after, swapped):
            return swapped
    free = list(range(count))
    found: list[int] = []
    for extent, stride in zip(after.shape, after.strides, strict=True):
        match = next((d for d in free if before.shape[d] == extent and before.strides[d] == stride), None)
        if match is None:
            return None
        free.remove(match)
        found.append(match)
    return tuple(found)


def _is_order(before: Value, after: Value, order: Sequence[int]) -> bool:
    return all(
        before.shape[d] == after.shape[k] and (before.strides[d] == after.strides[k] or after.shape[k] is ONE)
        for k, d in enumerate(order)
    )


def kept_dims(before: Sequence[Size], after: Sequence[Size]) -> tuple[int | None, ...]:
    """For each dimension of the operand of a reduction the result's, None where it is reduced."""
    if len(before) == len(after):
        return tuple(k if a == b else None for k, (a, b) in enumerate(zip(before, after, strict=True)))
    kept: list[int | None] = [None] * len(before)
    j = len(after) - 1
    for i in range(len(before) - 1, -1, -1):  # from the right: a gradient is summed over what lies outside
        if j >= 0 and before[i] == after[j]:
            kept[i] = j
            j -= 1
    return tuple(kept)
