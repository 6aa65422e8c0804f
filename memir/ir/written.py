"""Operators of one program written out for several numbers of layers: equal ones are one object, and made once."""

from __future__ import annotations

from collections.abc import Iterator

from memir.ir.bound import Bound
from memir.ir.core import Op, Storage
from memir.ir.names import path_sizes, split
from memir.ir.size import Size

Around = tuple[str, ...]  # the indices of the Repeats around an operator, as text


class Written:
    """What an operator becomes depends on a few sizes in it; so it is found by its place in the program and their values.

    For one program, and the same symbols bound each time.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[tuple[Size, ...], bool]] = {}  # of the operator at a place: sizes; whether a name is local
        self._ops: dict[tuple[object, ...], Op] = {}
        self._storages: dict[tuple[object, ...], Storage] = {}

    def op(self, place: int, op: Op, bound: Bound, around: Around) -> Op:
        """`bound.op(op)`, of the operator at this place of the program."""
        if place not in self._read:
            free = {*bound.env}
            sizes = dict.fromkeys(size for size in _sizes(op) if size.symbols() & free)
            names = (*op.operands, *(r.name for r in op.results), op.forward_of)
            self._read[place] = tuple(sizes), any(name in bound.local for name in names)
        sizes_read, local = self._read[place]
        key = (place, around if local else (), *[bound.size(size) for size in sizes_read])
        found = self._ops.get(key)
        if found is None:
            found = self._ops[key] = bound.op(op)
        return found

    def storage(self, *fields: object) -> Storage:
        """`Storage(*fields)`."""
        found = self._storages.get(fields)
        if found is None:
            found = self._storages[fields] = Storage(*fields)  # type: ignore[arg-type]
        return found


def _sizes(op: Op) -> Iterator[Size]:
    """The sizes in an operator's names, tensors, workspace and module path."""
    names = [*op.operands, *op.frees, *op.drops, *op.saves, *([] if op.forward_of is None else [op.forward_of])]
    names += [name for r in op.results for name in (r.name, r.storage)]
    for name in names:
        for index in split(name)[1]:
            if index.size is not None:
                yield from (index.size, index.start)
    for result in op.results:
        yield from (*result.shape, *result.strides, result.offset)
    yield op.scratch
    yield from path_sizes(op.path)
