"""FSDP2's all-gather of a group: what its parameters give to it, its buffer, and the copy-out into whole parameters.

(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_all_gather`, `foreach_all_gather_copy_out`;
_fsdp_param.py, FSDPParam.all_gather_inputs, to_sharded_post_forward.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memir.errors import UsageError
from memir.ir.core import Kind, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.groups import Group, Member
from memir.parallel.placed import Placed, Placer, numbered, suffixed
from memir.parallel.policy import FLOATS, Policy
from memir.parallel.unsharded import Unsharded

_COPY_IN, _GATHER = "all_gather_copy_in", "all_gather"  # streams


@dataclass(slots=True)
class Gathers:
    """Puts the operators of all-gathers in at the place where the walk is."""

    placer: Placer
    policy: Policy
    whole: Unsharded
    inputs: set[str] = field(default_factory=set)  # storages that foreach_all_gather holds until it returns

    def all_gather(self, group: Group) -> str:
        """`foreach_all_gather`; the storage of its output."""
        group.gathers += 1
        parts = [self._part(group, member) for member in group.members]
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else "u8"  # _get_all_gather_input_metadatas
        nbytes = sum((product(part.shape) * ITEMSIZE[part.dtype] for part in parts), ZERO)
        ranks = Size.of(self.policy.post_forward) if group.clones else self.policy.degree
        output = self._flat(group, "all_gather", dtype, nbytes.exact_div(ITEMSIZE[dtype]) * ranks)
        operands = tuple(dict.fromkeys(part.name for part in parts))
        self.placer.put("fsdp.all_gather_copy_in", operands, [output], stream=_COPY_IN, path=group.path)
        held = dict.fromkeys(part.storage for part in parts if part.storage in self.inputs)
        self.placer.put("c10d._allgather_base_", (output.name,), frees=held, stream=_GATHER, path=group.path)
        self.inputs.clear()
        return output.storage

    def copy_out(self, group: Group) -> Placed:
        """`foreach_all_gather_copy_out`: every parameter whole, in a storage of its own."""
        copy = self.placer.put("fsdp.split_with_sizes_copy", (group.pending,), path=group.path)
        for member in group.members:
            name = self.whole.gathered(member.parameter, copy)
            nbytes = member.chunk.padded * self.policy.degree * ITEMSIZE[member.value.dtype]
            self.placer.edit.declare(Storage(name, nbytes, Kind.COLLECTIVE, of=member.parameter))
        copy.frees += (clone.storage for clone in group.clones.values())  # FSDPParam.to_unsharded
        group.clones.clear()
        return copy

    def to_fewer(self, group: Group) -> None:
        """`to_sharded_post_forward`: a part for fewer ranks is cloned, one parameter after the other."""
        for member in group.members:
            whole = member.chunk.padded * self.policy.degree
            if whole.is_constant and whole.constant % self.policy.post_forward:
                message = f"fsdp: reshard={self.policy.post_forward} does not divide the {whole} elements of a parameter"
                raise UsageError(message, where=member.parameter)
            name = numbered(suffixed(member.parameter, ".post_forward"), 1)
            clone = self.placer.flat(name, member.value.dtype, whole.exact_div(self.policy.post_forward))
            made = self.placer.put("aten.clone", (self.whole.name_of(member.parameter),), [clone], path=group.path)
            made.frees.append(self.whole.resharded(member.parameter))
            group.clones[member.parameter] = clone

    def _part(self, group: Group, member: Member) -> Value:
        """What a parameter gives: its padded shard or its clone, in the type that is computed in.

        With mixed precision the parts are cast into one buffer; those that are offloaded are moved and then cast, one by one.
        """
        clone = group.clones.get(member.parameter)
        if clone is not None:
            part = clone
        else:
            dtype = self.policy.shard_dtype_of(member.value)
            part = Value(member.value.name, dtype, (member.chunk.padded,), (ONE,), ZERO, member.parameter)
        is_cast = self.policy.is_mixed and member.value.dtype in FLOATS
        if self.policy.offload and clone is None:
            part = self._copied(group, member, part, ".moved", part.dtype)
            return self._copied(group, member, part, ".cast", member.value.dtype) if is_cast else part
        return self._cast(group, member, part) if is_cast else part

    def _copied(self, group: Group, member: Member, part: Value, suffix: str, dtype: str) -> Value:
        copy = self.placer.flat(suffixed(member.parameter, numbered(suffix, group.gathers)), dtype, part.shape[0])
        frees = [part.storage] if part.storage in self.inputs else []
        self.placer.put("aten._to_copy", (part.name,), [copy], frees, stream=_COPY_IN, path=group.path)
        self.inputs -= {part.storage}
        self.inputs.add(copy.storage)
        return copy

    def _cast(self, group: Group, member: Member, part: Value) -> Value:
        """The part in the group's buffer of cast parts, which is made with the first (_get_param_all_gather_inputs)."""
        name = group.buffer(numbered("all_gather_input", group.gathers))
        if name not in self.inputs:
            cast = [m for m in group.members if m.value.dtype in FLOATS]
            sizes = [product(group.clones[m.parameter].shape) if group.clones else m.chunk.padded for m in cast]
            names = tuple(group.clones[m.parameter].name if group.clones else m.value.name for m in cast)
            flat = self._flat(group, "all_gather_input", member.value.dtype, sum(sizes, ZERO))
            self.placer.put("aten._foreach_copy_", names, [flat], stream=_COPY_IN, path=group.path)
            self.inputs.add(name)
        return replace(part, name=name, storage=name, dtype=member.value.dtype)

    def _flat(self, group: Group, what: str, dtype: str, numel: Size) -> Value:
        return self.placer.flat(group.buffer(numbered(what, group.gathers)), dtype, numel)
