"""FSDP1's flat parameters: the parameters of a unit in a row, of which each rank holds an equal part.

(torch/distributed/fsdp/_flat_param.py, `_init_flat_param_and_metadata`, `shard`; wrap.py for which modules are units.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.names import full_name
from memir.ir.size import ZERO, Size
from memir.parallel.groups import Group, Member, gradient_storages, tensors_of
from memir.parallel.policy import FLOATS
from memir.parallel.shards import Chunk
from memir.parallel.units import units_of
from memir.rewrite.cut import trained
from memir.rewrite.flow import Flow

ALIGNED = 16  # bytes, where use_orig_params (_flat_param.py, `_get_aligned_numel`)


def adapters_of(flow: Flow) -> list[str]:
    """PEFT's own units: modules that hold one trained weight and nothing else (peft/utils/other.py, fsdp_auto_wrap_policy)."""
    parameters = [full_name(s.name) for s in flow.program.storages if s.kind == Kind.PARAMETER]
    holders = [name.rpartition(".")[0] for name in parameters]
    of_trained = {full_name(name) for name in trained(flow)}
    return [
        holder
        for name, holder in zip(parameters, holders, strict=True)
        if name in of_trained and name.endswith(".weight") and holders.count(holder) == 1
    ]


def flat_groups_of(flow: Flow, degree: int, rank: int, inner: Sequence[str], *, aligned: bool) -> dict[str, Group]:
    """A unit's path to its group: layers, the root, and the modules `inner`.

    InconclusiveError: parameters of several types, or frozen ones beside trained ones, in one unit.
    """
    values, gradients = tensors_of(flow), gradient_storages(flow)
    groups: dict[str, Group] = {}
    for unit in units_of(flow):
        own: list[Storage] = []
        for storage in unit.parameters:
            holder = full_name(storage.name).rpartition(".")[0]
            if holder in inner:
                groups[holder] = _group(holder, unit.layer, [storage], values, gradients, degree, rank, aligned)
            else:
                own.append(storage)
        if own:
            groups[unit.path] = _group(unit.path, unit.layer, own, values, gradients, degree, rank, aligned)
    return groups


def _group(
    path: str,
    layer: int,
    storages: Sequence[Storage],
    values: Mapping[str, Value],
    gradients: Mapping[str, str],
    degree: int,
    rank: int,
    aligned: bool,
) -> Group:
    found = [values[s.name] for s in storages if s.name in values]
    floats = {v.dtype for v in found if v.dtype in FLOATS}
    if len(found) != len(storages) or len(floats) > 1:  # `_validate_tensors_to_flatten`
        message = "a flat parameter has one type, and this unit has several"
        raise InconclusiveError(message, where=f"@{path}: {', '.join(sorted({v.dtype for v in found}))}")
    if len({s.name in gradients for s in storages}) != 1:
        message = "frozen and trained parameters in one flat parameter get gradients alike"
        raise InconclusiveError(message, where=f"@{path}", hint="fsdp1{wrap=peft}  makes adapters units of their own")
    dtype = floats.pop() if floats else found[0].dtype  # quantized weights are stored in it (bnb_4bit_quant_storage)
    width = ITEMSIZE[dtype]
    step = max(ALIGNED, width) if aligned else width
    offsets, total = [], 0  # bytes
    for value in found:
        offsets.append(total)
        total += _nbytes(value)
        total += -total % step if value is not found[-1] else 0
    part = -(-total // (width * degree)) * width
    start, end = rank * part, (rank + 1) * part
    members = []
    for storage, value, offset in zip(storages, found, offsets, strict=True):
        size = ITEMSIZE[value.dtype]
        own = max(0, min(end, offset + _nbytes(value)) - max(start, offset)) // size
        chunk = Chunk((Size.of(own),), Size.of(own))
        members.append(Member(chunk, value, gradients.get(storage.name), Size.of(offset // size)))
    left = part - sum(m.chunk.padded.constant * ITEMSIZE[m.value.dtype] for m in members)
    if left:  # padding, at the end and for alignment, counts to the last of them
        last = members[-1]
        padded = last.chunk.padded + left // ITEMSIZE[last.value.dtype]
        members[-1] = Member(Chunk(last.chunk.shape, padded), last.value, last.gradient, last.offset)
    return Group(path, layer, tuple(members), dtype)


def _nbytes(value: Value) -> int:
    return product(value.shape).constant * ITEMSIZE[value.dtype]


def numel_of(group: Group) -> Size:
    """The elements of the flat parameter without padding at its end."""
    last = group.members[-1]
    nbytes = (last.offset + product(last.value.shape)) * ITEMSIZE[last.value.dtype]
    return nbytes.exact_div(ITEMSIZE[group.dtype])


def part_of(group: Group) -> Size:
    """The elements that a rank holds, padding included."""
    nbytes = sum((m.chunk.padded * ITEMSIZE[m.value.dtype] for m in group.members), ZERO)
    return nbytes.exact_div(ITEMSIZE[group.dtype])
