"""FSDP2's reduce-scatter of a group's gradients, and what of it lives on as the rank's gradients.

(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`; _fsdp_param_group.py, AllReduceState.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Value
from memir.ir.layout import contiguous
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.groups import Group, Member
from memir.parallel.placed import Placed, Placer, numbered, suffixed
from memir.parallel.policy import Policy

_SCATTER, _REDUCE = "reduce_scatter", "all_reduce"  # streams


@dataclass(slots=True)
class Reduces:
    """Puts the operators of reduce-scatters in at the place where the walk is."""

    placer: Placer
    policy: Policy
    sharded: dict[str, Value] = field(default_factory=dict)  # parameter -> its sharded gradient

    def reduce(self, group: Group, trained: Sequence[Member], gradients: Sequence[Value]) -> str:
        """`foreach_reduce` of whole gradients, which die in it; the storage of its input, which the caller holds.

        The last gradient lives until the function returns: the loop's variable `unsharded_grad` holds it.
        """
        put = self.placer.put
        group.reductions += 1
        dtypes = {g.dtype for g in gradients}
        if len(dtypes) != 1:
            where = f"@{group.path}: {', '.join(sorted(dtypes))}"
            raise InconclusiveError("FSDP reduces gradients of one type only", where=where)
        dtype = self.policy.reduce_dtype or dtypes.pop()
        numel = sum((m.chunk.padded for m in trained), ZERO)
        source = self._flat(group, "reduce_scatter_input", dtype, numel * self.policy.degree)
        copy_in = put("fsdp.chunk_cat", tuple(g.name for g in gradients), [source], path=group.path)
        copy_in.frees += [g.storage for g in gradients[:-1]]
        output, last = self._scattered(group, source, dtype, self.policy.shard_dtype_of(trained[0].value), numel)
        self._view_out(group, trained, output, last, gradients[-1].storage)
        return source.storage

    def _scattered(self, group: Group, source: Value, dtype: str, shards: str, numel: Size) -> tuple[Value, Placed]:
        """Reduced over the ranks, over the groups of HSDP, cast to the shards' type, moved to the host."""
        put = self.placer.put
        cast, move = dtype != shards, self.policy.offload
        output = self._flat(group, "reduce_scatter_output" if cast or move else "sharded_grad", dtype, numel)
        last = put("c10d._reduce_scatter_base_", (source.name,), [output], stream=_SCATTER, path=group.path)
        stream = _SCATTER
        if self.policy.replicas is not ONE:
            stream = _REDUCE
            last = put("c10d.allreduce_", (output.name,), stream=stream, path=group.path)
        if cast:
            old, output = output, self._flat(group, "reduced" if move else "sharded_grad", shards, numel)
            last = put("aten._to_copy", (old.name,), [output], stream=stream, path=group.path)
            if self.policy.replicas is ONE:
                last.frees.append(old.storage)
            else:
                group.all_reduce_state = old.storage  # AllReduceState: until the end of backward
        if move:
            old, output = output, self._flat(group, "sharded_grad", shards, numel, "host")
            last = put("aten._to_copy", (old.name,), [output], [old.storage], stream, group.path)
        return output, last

    def _view_out(self, group: Group, trained: Sequence[Member], output: Value, last: Placed, held: str) -> None:
        """The rank's gradients are views of the output; one that is there already takes the new one in."""
        offset = ZERO
        for member in trained:
            shape = member.chunk.shape
            name = suffixed(member.value.name, numbered(".sharded_grad", group.reductions))
            view = Value(name, output.dtype, shape, contiguous(shape), offset, output.storage)
            last.results.append(view)
            old = self.sharded.setdefault(member.parameter, view)
            if old is not view:
                self.placer.put("aten.add_.Tensor", (old.name, view.name), stream=last.stream, path=group.path)
            offset = offset + member.chunk.padded
        end = self.placer.placed[-1]
        end.frees.append(held)
        if group.output:
            end.frees.append(output.storage)
        group.output = group.output or output.storage

    def _flat(self, group: Group, what: str, dtype: str, numel: Size, device: str = "gpu") -> Value:
        kind = Kind.GRADIENT if what == "sharded_grad" else Kind.COLLECTIVE
        return self.placer.flat(group.buffer(numbered(what, group.reductions)), dtype, numel, kind, device)
