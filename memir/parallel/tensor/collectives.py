"""Marks become what DTensor's redistribution runs, operator by operator, with the tensors that it really makes.

torch/distributed/_functional_collectives.py and torch/distributed/tensor/placement_types.py: a collective copies into a tensor
of its own. One along another dimension than the first is rearranged before (reduce-scatter) or after (all-gather; a view where
all dimensions before are 1, `_maybe_view_chunk_cat`). A tensor is cut by copying a piece of it (`_replicate_to_shard`).
"""

from __future__ import annotations

from dataclasses import replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.tensor.marks import MARK
from memir.parallel.tensor.names import suffixed
from memir.parallel.tensor.placements import Placed


def redistribute(state: Placed) -> None:
    """Puts the operators in the marks' places."""
    for position, op in enumerate(state.graph.flow.ops):
        if op.opcode == MARK:
            *before, last = _operators(state, state.edit.op(position))
            state.edit.before(position, *before)
            state.edit.put(position, last)


def _operators(state: Placed, mark: Op) -> list[Op]:
    name, parts = mark.operands[0], state.reach.parts
    source, result = state.local.value(state.graph.values[name]), mark.results[0]
    have, want = parts.get(name), parts.get(result.name)
    if name in state.reach.partial:
        if want is None:
            return [replace(mark, opcode="_c10d_functional.all_reduce")]
        return _reduce_scatter(state, mark, source, want.dim)
    if have is not None and want is None:
        return _all_gather(state, mark, source, have.dim)
    if have is None and want is not None:
        return _chunk(state, mark, source, want.dim)
    raise InconclusiveError("memir cannot tell how a tensor is divided on both sides of a split product", where=mark.path)


def _reduce_scatter(state: Placed, mark: Op, source: Value, dim: int) -> list[Op]:
    result, plain = mark.results[0], _plain(mark)
    if dim == 0:
        return [replace(mark, opcode="_c10d_functional.reduce_scatter_tensor")]
    views, pieces = _pieces(state, source, dim, plain)
    shape = (state.local.degree * result.shape[0], *result.shape[1:])
    joined = _value(state.edit, result, ".joined", shape)
    join_op = replace(plain, opcode="aten.cat", operands=pieces, results=(joined,))
    last = replace(mark, opcode="_c10d_functional.reduce_scatter_tensor", operands=(joined.name,))
    return [views, join_op, replace(last, frees=(joined.storage, *mark.frees))]


def _all_gather(state: Placed, mark: Op, source: Value, dim: int) -> list[Op]:
    result, plain = mark.results[0], _plain(mark)
    if all(extent is ONE for extent in source.shape[:dim]):
        return [replace(mark, opcode="_c10d_functional.all_gather_into_tensor")]
    shape = (state.local.degree * source.shape[0], *source.shape[1:])
    gathered = _value(state.edit, result, ".gathered", shape)
    first = replace(plain, opcode="_c10d_functional.all_gather_into_tensor", operands=mark.operands, results=(gathered,))
    views, pieces = _pieces(state, gathered, 0, plain)
    return [first, views, replace(mark, opcode="aten.cat", operands=pieces, frees=(gathered.storage, *mark.frees))]


def _chunk(state: Placed, mark: Op, source: Value, dim: int) -> list[Op]:
    views, pieces = _pieces(state, source, dim, _plain(mark))
    return [views, replace(mark, opcode="aten.clone", operands=pieces[:1])]


def _pieces(state: Placed, source: Value, dim: int, plain: Op) -> tuple[Op, tuple[str, ...]]:
    """The operator that cuts a tensor into as many views as there are ranks, and their names."""
    extent = state.local.piece(source.shape[dim])
    shape = (*source.shape[:dim], extent, *source.shape[dim + 1 :])
    base = plain.results[0].name
    views = []
    degree = state.local.degree
    for rank in range(degree.constant if degree.is_constant else 1):  # of a symbolic number of pieces the first stands for all
        name = suffixed(base, f".piece{rank}")
        offset = source.offset + rank * extent * source.strides[dim]
        views.append(replace(source, name=name, shape=shape, offset=offset))
    return replace(plain, opcode="aten.split.Tensor", operands=(source.name,), results=tuple(views)), tuple(
        v.name for v in views
    )


def _plain(mark: Op) -> Op:
    """The mark without what it ends; its result's name is what its helpers' names are made of."""
    return replace(mark, frees=(), drops=(), saves=())


def _value(edit: Edit, like: Value, suffix: str, shape: tuple[Size, ...]) -> Value:
    """A tensor of its own, contiguous, for a collective."""
    name = suffixed(like.name, suffix)
    storage = edit.declare(Storage(name, product(shape) * ITEMSIZE[like.dtype], Kind.COLLECTIVE))
    return replace(like, name=name, shape=shape, strides=contiguous(shape), offset=ZERO, storage=storage)
