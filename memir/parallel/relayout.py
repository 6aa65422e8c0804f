"""A tensor that has other strides than before: its views have others too, and where none is possible, reshape copies.

`aten.view` of what is not viewable is what `Tensor.reshape` turns into a copy (aten/src/ATen/native/TensorShape.cpp, `reshape`;
aten/src/ATen/TensorUtils.cpp, `computeStride`). Followed are views of the tensor; operators that make new tensors end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memir.ir.core import Kind, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.frame import within

Shape = tuple[Size, ...]


def relaid(edit: Edit, values: dict[str, Value], before: Value, after: Value, position: int) -> None:
    """`after` stands for `before`, which operator `position` makes: the views of it that follow are made again.

    `values` are the program's, by name.
    """
    flow = edit.flow
    now = {before.name: after}
    copies: dict[str, int] = {}  # storage of a copy -> the last operator that needs it
    for place in range(position + 1, len(flow.ops)):
        op = edit.ops.get(place, flow.ops[place])
        read = [o for o in op.operands if o in now] if op is not None else []
        if op is None or not read:
            continue
        for name in read:
            if now[name].storage in copies:
                copies[now[name].storage] = max(copies[now[name].storage], place)
        results = tuple(
            _view(edit, values[read[0]], now[read[0]], r, place, copies) if r.storage == before.storage else r
            for r in op.results
        )
        now |= {r.name: new for r, new in zip(op.results, results, strict=True) if new != r}
        opcode = "aten.clone" if any(r.storage in copies and r.storage != now[read[0]].storage for r in results) else op.opcode
        moved = {before.storage: now[read[0]].storage}
        saves = tuple(moved.get(s, s) for s in op.saves)
        edit.ops[place] = replace(op, opcode=opcode, results=results, saves=saves)
        for saved in set(saves) & copies.keys():
            group = flow.group.get(flow.node[place] or "", [])
            copies[saved] = max([copies[saved], *group])
    for name, place in copies.items():
        op = edit.op(place)
        edit.ops[place] = replace(op, frees=(*op.frees, name))


def _view(edit: Edit, old: Value, new: Value, result: Value, place: int, copies: dict[str, int]) -> Value:
    """The result of a view operator on `new`, which was a view of `old`."""
    moved = replace(result, storage=new.storage, offset=new.offset)
    pairs = list(zip(old.shape, old.strides, strict=True))
    wanted = list(zip(result.shape, result.strides, strict=True))
    if sorted(map(str, pairs)) == sorted(map(str, wanted)):
        order = [pairs.index(pair) for pair in wanted]
        return replace(moved, strides=tuple(new.strides[k] for k in order))
    strides = viewed(new.shape, new.strides, result.shape)
    if strides is not None:
        return replace(moved, strides=strides)
    name = within(result.name, ".copy")
    edit.declare(Storage(name, product(result.shape) * ITEMSIZE[result.dtype], Kind.ACTIVATION))
    copies[name] = place
    return replace(result, storage=name, strides=contiguous(result.shape), offset=ZERO)


def viewed(shape: Sequence[Size], strides: Sequence[Size], wanted: Sequence[Size]) -> Shape | None:
    """The strides of a view in the shape `wanted`; None where only a copy has it (`computeStride`)."""
    left = list(wanted)
    made: list[Size] = []
    chunk = ONE
    for k in range(len(shape) - 1, -1, -1):
        chunk = chunk * shape[k]
        if k and strides[k - 1] == shape[k] * strides[k]:
            continue
        base = strides[_last(shape, strides, k)]
        total = ONE
        while left and total != chunk:
            made.append(base * total)
            total = total * left.pop()
        if total != chunk:
            return None
        chunk = ONE
    made += [made[-1]] * len(left) if all(extent is ONE for extent in left) else []
    return tuple(reversed(made)) if len(made) == len(wanted) else None


def _last(shape: Sequence[Size], strides: Sequence[Size], first: int) -> int:
    """The innermost dimension of the stretch of dimensions that begins at `first` and lies in one."""
    k = first
    while k + 1 < len(shape) and strides[k] == shape[k + 1] * strides[k + 1]:
        k += 1
    return k
