"""FSDP1's runtime followed hook by hook over a flat step: flat parameters gathered, freed, and their gradients reduced.

The methods are named after torch/distributed/fsdp/_runtime_utils.py and FlatParamHandle in _flat_param.py, as of torch 2.13
(the same in 2.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memir.ir.core import Kind, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous
from memir.ir.size import ZERO, Size
from memir.parallel.calls import Call, Pass
from memir.parallel.edit import Edit
from memir.parallel.flat_groups import numel_of, part_of
from memir.parallel.groups import BEFORE, Group
from memir.parallel.hooks import Hook, Hooks
from memir.parallel.placed import numbered, suffixed
from memir.parallel.policy import FLOATS

_SOURCE = "torch/distributed/fsdp/_runtime_utils.py"
_UNSHARD, _REDUCE = "unshard", "post_backward"  # streams


@dataclass(frozen=True, slots=True)
class FlatPolicy:
    """What FullyShardedDataParallel is told."""

    degree: int
    replicas: int = 1  # HYBRID_SHARD: as many such groups
    reshard: bool = True  # FULL_SHARD; SHARD_GRAD_OP keeps the parameters from forward to backward
    shard_dtype: str = ""  # "" as traced
    reduce_dtype: str = ""  # "" as traced
    prefetch: str = "pre"  # BackwardPrefetch: "pre", "post", "none"
    forward_prefetch: bool = False
    reentrant: bool = False  # reentrant checkpoints are around FSDP's modules
    kept: bool = True  # use_orig_params: the flat gradients outlive zero_grad
    listed: bool = False  # on the CPU all-gathers go through lists of tensors


class FlatRuntime(Hooks):
    """FullyShardedDataParallel's states; after `run`, `sharded` has the rank's gradients."""

    def __init__(self, edit: Edit, groups: dict[str, Group], policy: FlatPolicy) -> None:
        super().__init__(edit, groups, _SOURCE)
        self.policy = policy
        self.order: list[Group] = []  # _ExecOrderData.handles_post_forward_order
        self.following: dict[str, str] = {}  # handles_pre_forward_order: a unit's path -> the next one's
        self.begun = False
        self.index: dict[str, int] = {}  # _post_forward_index
        self.needed: set[str] = set()  # _needs_pre_backward_unshard
        self.sharded: dict[str, Value] = {}
        self.checkpointed: set[str] = set()
        self.held: list[str] = []  # storages that hooks on frozen units' inputs keep

    def run(self, passes: Sequence[Pass]) -> None:
        """Walks over the step; afterwards `edit` has all changes."""
        order = [call.path for call in passes[0].calls if call.path in self.groups]
        self.following = dict(pairwise(order))
        if self.policy.reentrant:
            for one in passes:
                self._hold(one)
        super().run(passes)

    def _hold(self, one: Pass) -> None:
        """What the hook on a frozen unit's inputs keeps: it has their AccumulateGrad nodes, until the end of backward.

        A reentrant checkpoint runs its layer again on leaves, so that a node has the layer's input, and the leaf its gradient
        (torch/autograd/graph.py, register_multi_grad_hook; torch/utils/checkpoint.py, CheckpointFunction.backward).
        """
        flow = self.flow
        for call in one.calls:
            group = self.groups.get(call.path)
            if group is None or group.trained or not call.path or call.post_backward is None:
                continue
            shapes = {r.shape for r in flow.ops[call.last].results}
            inside = range(call.first, call.last + 1)
            read = [o for p in inside for o in flow.ops[p].operands if flow.made.get(o, call.first) not in inside]
            outside = {o for o in read if o in flow.made and self._value(o).shape in shapes}
            gradients = [r.storage for r in flow.ops[call.post_backward].results if r.shape in shapes]
            for storage in dict.fromkeys([*(flow.storage[o] for o in sorted(outside)), *gradients]):
                if self.edit.take_free(storage) is not None:
                    self.held.append(storage)

    def _value(self, name: str) -> Value:
        return next(r for r in self.flow.ops[self.flow.made[name]].results if r.name == name)

    def _add(self, hooks: dict[tuple[int, bool], list[Hook]], call: Call, one: Pass) -> None:
        """Where a reentrant checkpoint runs a module again, the hooks of its forward run again."""
        group = self.groups.get(call.path)
        again = call.again if self.policy.reentrant else None
        if group is not None and again is not None:
            self.checkpointed.add(call.path)
            hooks[again[0], False].append(lambda: self.pre_forward(group))
            hooks[again[1], True].insert(0, lambda: self.post_forward(group, again=True))
        super()._add(hooks, call, one)

    def begin_of_backward(self, call: Call) -> int | None:
        """A reentrant checkpoint's module has outputs with a gradient only when it has run again."""
        return call.differentiated if self.policy.reentrant and call.path else call.pre_backward

    def end_of_backward(self, group: Group, call: Call, one: Pass) -> int | None:
        """Behind AccumulateGrad of a trained flat parameter; of a frozen one where the gradients of the inputs are there.

        Autograd runs the node that splits the flat parameter when all are through that were made after it. Prefetched in
        forward, it is made before the forward of the unit that gathered it ahead.
        """
        if not group.trained:
            return call.post_backward
        ahead = call
        if self.policy.forward_prefetch and group.path:
            before = {following: path for path, following in self.following.items()}[group.path]
            ahead = next(other for other in one.calls if other.path == before)
        return ahead.through if ahead.path else one.end

    # -- hooks

    def pre_forward(self, group: Group) -> None:
        """_pre_forward_unshard, with the prefetch of the next in forward order."""
        if not group.path and self.policy.kept and not self.begun:  # _reset_flat_param_grad_info_if_needed
            self.placer.free(*(g.buffer(BEFORE) for g in self.groups.values() if g.trained))
        self.begun = True
        self.unshard(group)
        if self.policy.forward_prefetch and group.path in self.following:
            self.unshard(self.groups[self.following[group.path]])

    def post_forward(self, group: Group, again: bool = False) -> None:
        """_post_forward_reshard: all but the root's are freed; under no_grad there is no backward to come."""
        if not group.members:
            return
        if self.policy.reshard and group.path:
            self.reshard(group)
        if not self.index.get(group.path):
            self.index[group.path] = len(self.order)
        self.order.append(group)
        if again or group.path not in self.checkpointed:
            self.needed.add(group.path)

    def pre_backward(self, group: Group) -> None:
        """_pre_backward_hook."""
        self.unshard(group)
        self.needed.discard(group.path)
        if self.policy.prefetch == "pre":
            self.prefetch(group)

    def post_backward(self, group: Group) -> None:
        """_post_backward_hook and _reduce_grad; of frozen ones _post_backward_reshard_only_hook."""
        if not group.members:
            return
        group.done = True
        flat = self._flat_gradient(group) if group.trained else None
        self.reshard(group)
        if self.policy.prefetch == "post":
            self.prefetch(group)
        if flat is not None:
            self._reduce(group, flat)

    def final_callback(self) -> None:
        """_post_backward_final_callback: _catch_all_reshard."""
        for group in self.groups.values():
            if not group.done:
                self.reshard(group)
            group.done = False
        self.placer.free(*self.held)
        self.held.clear()
        self.order.clear()
        self.index.clear()
        self.needed.clear()

    # -- parameters

    def prefetch(self, group: Group) -> None:
        """_prefetch_handle: the one whose forward ended before, if its outputs have a backward to come."""
        target = self.index.get(group.path, 0) - 1
        if not group.members or target < 0:
            return
        if self.order[target].path in self.needed:
            self.unshard(self.order[target])

    def unshard(self, group: Group) -> None:
        """_unshard: pre_unshard, unshard and post_unshard of the handle."""
        if not group.members or self.whole.is_whole(group.members[0].parameter):
            return
        group.gathers += 1
        dtype, part = group.dtype, part_of(group)
        operands = tuple(m.value.name for m in group.members)
        frees = []
        if self.policy.shard_dtype not in ("", dtype) and dtype in FLOATS:
            low = self.placer.flat(group.buffer(numbered("mp_shard", group.gathers)), dtype, part)
            self.placer.put("aten.copy_", operands, [low], stream="pre_unshard", path=group.path)
            operands, frees = (low.name,), [low.storage]
        whole = part * self.policy.degree
        flat = self.placer.flat(group.buffer(numbered("flat_param", group.gathers)), dtype, whole)
        gather = self.placer.put("c10d._allgather_base_", operands, [flat], frees, _UNSHARD, group.path)
        if self.policy.listed:
            gather.scratch = whole * ITEMSIZE[dtype]
        for member in group.members:
            self.whole.gathered(member.parameter, gather, flat.storage, member.offset)

    def reshard(self, group: Group) -> None:
        """_reshard: the whole flat parameter is freed."""
        if group.members and self.whole.is_whole(group.members[0].parameter):
            names = {self.whole.resharded(m.parameter): None for m in group.members}
            self.placer.free(*names)

    # -- gradients

    def _flat_gradient(self, group: Group) -> Value:
        """The backward of torch.split into views: their gradients in a row."""
        group.reductions += 1
        gradients = self.gradients(group)
        name = group.buffer(numbered("flat_grad", group.reductions))
        flat = self.placer.flat(name, gradients[0].dtype, numel_of(group), Kind.GRADIENT)
        names = tuple(g.name for g in gradients)
        self.placer.put("aten.cat", names, [flat], [g.storage for g in gradients], path=group.path)
        return flat

    def _reduce(self, group: Group, flat: Value) -> None:
        """Cast to the type of the reduction, padded, reduce-scattered, cast to the shards' type, added to what is there."""
        put, held = self.placer.put, [flat.storage]
        part = part_of(group)
        dtype = self.policy.reduce_dtype or flat.dtype
        shards = self.policy.shard_dtype or group.dtype

        def buffer(what: str, of: str, numel: Size, kind: Kind = Kind.COLLECTIVE) -> Value:
            return self.placer.flat(group.buffer(numbered(what, group.reductions)), of, numel, kind)

        source = flat
        if dtype != flat.dtype:
            source = buffer("reduced_grad", dtype, flat.shape[0])
            put("aten._to_copy", (flat.name,), [source], stream=_REDUCE, path=group.path)
            held.append(source.storage)
        if numel_of(group) is not part * self.policy.degree:
            padded = buffer("padded_grad", dtype, part * self.policy.degree)
            put("aten.constant_pad_nd", (source.name,), [padded], stream=_REDUCE, path=group.path)
            source = padded
            held.append(padded.storage)
        cast = dtype != shards
        output = buffer(
            "reduce_scatter_output" if cast else "sharded_grad", dtype, part, Kind.COLLECTIVE if cast else Kind.GRADIENT
        )
        last = put("c10d._reduce_scatter_base_", (source.name,), [output], stream=_REDUCE, path=group.path)
        if self.policy.replicas > 1:
            last = put("c10d.allreduce_", (output.name,), stream="all_reduce", path=group.path)
        if cast:
            old, output = output, buffer("sharded_grad", shards, part, Kind.GRADIENT)
            last = put("aten._to_copy", (old.name,), [output], [old.storage], _REDUCE, group.path)
        if group.output:
            last = put("aten.add_.Tensor", (group.output, output.name), stream=_REDUCE, path=group.path)
            held.append(output.storage)
        else:
            group.output = output.storage
            offset = ZERO
            for member in group.members:
                shape = member.chunk.shape
                view = Value(
                    suffixed(member.value.name, ".sharded_grad"), shards, shape, contiguous(shape), offset, output.storage
                )
                last.results.append(view)
                self.sharded[member.parameter] = view
                offset = offset + member.chunk.padded
        last.frees += held
