"""Shapes, strides, offsets and bytes of one rank's part of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import reach
from memir.ir.reshape import Part, quotient
from memir.ir.size import ZERO, Size, ceil_div
from memir.parallel.tensor.walk import Graph


@dataclass(slots=True)
class Local:
    """One of `degree` ranks' part of every value that has one."""

    graph: Graph
    parts: Mapping[str, Part]
    degree: Size
    first: dict[str, Value] = field(default_factory=dict)  # storage -> the value that allocates it, or is there before
    _values: dict[Value, Value] = field(default_factory=dict)
    _rows: dict[str, tuple[Size | None, Size]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in self.graph.values.values():
            self.first.setdefault(value.storage, value)

    def piece(self, extent: Size) -> Size:
        """A rank's share of an extent: over the degree where that is a symbol. UsageError for a number that does not divide."""
        if not self.degree.is_constant:
            return extent * self.degree**-1
        degree = self.degree.constant
        if all(coefficient % degree == 0 for _, coefficient in extent.terms):
            return extent.exact_div(degree)
        if extent.is_constant:
            raise UsageError(f"tensor-parallel: {extent} does not divide by degree {degree}")
        return ceil_div(extent, degree)

    def extent(self, value: Value, part: Part) -> Size:
        """A rank's extent of the dimension that has the part."""
        return part.outer * self.piece(_inside(value, part))

    def value(self, value: Value) -> Value:
        """The value as the rank has it."""
        found = self._values.get(value)
        if found is None:
            found = self._values[value] = self._value(value)
        return found

    def _value(self, value: Value) -> Value:
        part = self.parts.get(value.name)
        whole, own = self._row(value.storage)
        shape = value.shape
        if part is not None:
            shape = (*shape[: part.dim], self.extent(value, part), *shape[part.dim + 1 :])
        if part is None and whole is None:
            return value
        strides = tuple(self._scaled(s, whole, own) for s in value.strides)
        return replace(value, shape=shape, strides=strides, offset=self._offset(value, part, whole, own))

    def storage(self, storage: Storage) -> Storage:
        """The storage as the rank has it."""
        whole, own = self._row(storage.name)
        first = self.first.get(storage.name)
        if whole is None or first is None:
            return storage
        if storage.nbytes == reach(first.shape, first.strides, first.offset) * ITEMSIZE[first.dtype]:
            new = self.value(first)
            return replace(storage, nbytes=reach(new.shape, new.strides, new.offset) * ITEMSIZE[new.dtype])
        if quotient(storage.nbytes, whole) is None:
            raise InconclusiveError("a divided tensor does not fill its storage", where=f"${storage.name}")
        return replace(storage, nbytes=self._scaled(storage.nbytes, whole, own))

    def _row(self, storage: str) -> tuple[Size | None, Size]:
        """The elements over which the divided part of a storage reaches, of the whole and of the rank's."""
        found = self._rows.get(storage)
        if found is None:
            found = self._rows[storage] = self._reaching(storage)
        return found

    def _reaching(self, storage: str) -> tuple[Size | None, Size]:
        first = self.first.get(storage)
        part = None if first is None else self.parts.get(first.name)
        if first is None or part is None:
            return None, ZERO
        stride, inside = first.strides[part.dim], _inside(first, part)
        return stride * inside, stride * self.piece(inside)

    @staticmethod
    def _scaled(size: Size, whole: Size | None, own: Size) -> Size:
        """A distance in elements: what steps over the divided dimension becomes shorter."""
        times = None if whole is None or not size.terms else quotient(size, whole)
        return size if times is None else times * own

    def _offset(self, value: Value, part: Part | None, whole: Size | None, own: Size) -> Size:
        """An offset's terms: rows of the whole, pieces within the divided dimension, and what lies within one element of it."""
        total = ZERO
        for term in value.offset.terms:
            size = Size((term,))
            scaled = self._scaled(size, whole, own)
            steps = None if part is None or scaled != size else quotient(size, value.strides[part.dim])
            total = total + (scaled if steps is None or part is None else self.piece(steps) * value.strides[part.dim])
        return total


def _inside(value: Value, part: Part) -> Size:
    """The extent of what is divided: the dimension without what lies outside of the part."""
    inside = quotient(value.shape[part.dim], part.outer)
    if inside is None:
        raise InconclusiveError(f"{part.outer} does not divide {value.shape[part.dim]}", where=f"%{value.name}")
    return inside
