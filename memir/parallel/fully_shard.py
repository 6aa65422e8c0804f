"""FSDP2's runtime followed hook by hook over a flat step: what fully_shard gathers, holds, reduces and frees, and when.

The methods are named after those of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (FSDPParamGroup) and
_fsdp_state.py (FSDPState) that they follow, as of torch 2.13. Python's references decide when a buffer dies, so what a local
variable holds until its function returns is held here too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from memir.errors import InconclusiveError
from memir.parallel.accumulated import parts_of, without_additions
from memir.parallel.calls import Call, Pass
from memir.parallel.edit import Edit
from memir.parallel.gathers import Gathers
from memir.parallel.groups import Group
from memir.parallel.placed import Placer
from memir.parallel.policy import Policy
from memir.parallel.reduces import Reduces
from memir.parallel.units import ROOT
from memir.parallel.unsharded import Unsharded

_SOURCE = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"


class Runtime:
    """One walk over the step; after `run`, `edit` has all changes, and `reduces.sharded` the rank's gradients."""

    def __init__(self, edit: Edit, groups: dict[int, Group], policy: Policy) -> None:
        self.edit, self.flow, self.groups, self.policy = edit, edit.flow, groups, policy
        members = [member for group in groups.values() for member in group.members]
        self.placer = Placer(edit, source=_SOURCE)
        self.whole = Unsharded(edit, {m.parameter: m.value for m in members})
        self.gathers = Gathers(self.placer, policy, self.whole)
        self.reduces = Reduces(self.placer, policy)
        self.parts = parts_of(edit.flow, [(m.gradient, m.value) for m in members if m.gradient is not None])
        self.all_gather_state = ""  # FSDPCommContext's, storages
        self.reduce_scatter_states: list[str] = []
        self.post_forward_order: list[Group] = []

    def run(self, passes: tuple[Pass, ...]) -> None:
        """Calls the hooks where they run, and rewrites the operators between."""
        hooks: dict[tuple[int, bool], list[Callable[[], None]]] = defaultdict(list)
        walked = {phase for one in passes for phase in (one.forward, one.backward)}
        for one in passes:
            for call in one.calls:
                self._add(hooks, call)
            if one.backward:
                hooks[one.end, True].append(self.final_callback)
        without_additions(self.edit, self.parts.values())
        for position, phase in enumerate(self.flow.phase):
            for behind in (False, True):
                self.placer.position, self.placer.behind = position, behind
                for hook in hooks.get((position, behind), ()):
                    hook()
                if phase in walked and not behind:
                    self.whole.rewrite(position)
        self.placer.apply()

    def _add(self, hooks: dict[tuple[int, bool], list[Callable[[], None]]], call: Call) -> None:
        layer = call.layer
        hooks[call.first, False].append(lambda: self.pre_forward(layer))
        hooks[call.last, True].insert(0, lambda: self.post_forward(layer))  # the root's comes after that of its last layer
        if call.pre_backward is not None:
            hooks[call.pre_backward, False].append(lambda: self.pre_backward(layer))
        if call.post_backward is not None:
            hooks[call.post_backward, True].append(lambda: self.post_backward(layer))

    # -- FSDPState

    def pre_forward(self, layer: int) -> None:
        """_pre_forward: gather, wait, gather those that are prefetched by hand."""
        group = self.groups.get(layer)
        if group is not None:
            self.unshard(group)
            self.wait_for_unshard(group, forward=True)
        if layer != ROOT:
            for ahead in range(layer + 1, layer + 1 + self.policy.forward_prefetch):
                if ahead in self.groups:
                    self.unshard(self.groups[ahead])

    def post_forward(self, layer: int) -> None:
        """_post_forward: reshard; the root's lets go of the last all-gather."""
        group = self.groups.get(layer)
        if group is not None:
            if self.policy.reshard_root if layer == ROOT else self.policy.reshard:
                (self.gathers.to_fewer if self.policy.post_forward else self.reshard)(group)
            group.indices.append(len(self.post_forward_order))
            self.post_forward_order.append(group)
        if layer == ROOT and self.all_gather_state:
            self.placer.free(self.all_gather_state)
            self.all_gather_state = ""

    def pre_backward(self, layer: int) -> None:
        """_pre_backward: gather if it is not there, wait, prefetch."""
        group = self.groups.get(layer)
        if group is None:
            return
        self.unshard(group)
        self.wait_for_unshard(group, forward=False)
        by_hand = range(layer - 1, max(-1, layer - 1 - self.policy.backward_prefetch), -1) if layer != ROOT else range(0)
        for ahead in by_hand:
            if ahead in self.groups:
                self.unshard(self.groups[ahead])
        if not by_hand and group.indices:  # FSDPParamGroup._backward_prefetch
            index = group.indices.pop()
            if index > 0:
                self.unshard(self.post_forward_order[index - 1])

    def final_callback(self) -> None:
        """_root_post_backward_final_callback, with finalize_backward of each group; the root is the first."""
        for layer in sorted(self.groups):
            group = self.groups[layer]
            if not group.done:
                self.post_backward(layer)
            self.placer.free(*filter(None, (group.pending, group.all_reduce_state)))
            group.done, group.pending, group.all_reduce_state = False, "", ""
            group.indices.clear()
        self.post_forward_order.clear()
        self.placer.free(*self.reduce_scatter_states)
        self.reduce_scatter_states.clear()

    # -- FSDPParamGroup

    def unshard(self, group: Group) -> None:
        """unshard: nothing where an all-gather is under way or the parameters are whole."""
        if not group.pending and not self.whole.is_whole(group.members[0].parameter):
            group.pending = self.gathers.all_gather(group)

    def wait_for_unshard(self, group: Group, *, forward: bool) -> None:
        """wait_for_unshard: in forward the buffer is kept until the next group has copied out."""
        if not group.pending:
            return
        copy_out = self.gathers.copy_out(group)
        if not forward:
            copy_out.frees.append(group.pending)
        elif self.all_gather_state:
            copy_out.frees.append(self.all_gather_state)
        self.all_gather_state = group.pending if forward else self.all_gather_state
        group.pending = ""

    def reshard(self, group: Group) -> None:
        """_to_sharded: the storages of the whole parameters are emptied."""
        if self.whole.is_whole(group.members[0].parameter):
            self.placer.free(*(self.whole.resharded(m.parameter) for m in group.members))

    def post_backward(self, layer: int) -> None:
        """post_backward: reshard, let go of the reduce-scatter before, reduce."""
        group = self.groups.get(layer)
        if group is None:
            return
        group.done = True
        self.reshard(group)
        self.placer.free(*self.reduce_scatter_states)
        self.reduce_scatter_states.clear()
        trained = [m for m in group.members if m.gradient is not None]
        if not trained:
            return
        phase = self.flow.phase[self.placer.position]
        parts = [self.parts.get((phase, m.parameter)) for m in trained]
        if None in parts:
            where = next(m.parameter for m, part in zip(trained, parts, strict=True) if part is None)
            raise InconclusiveError("a parameter has no gradient of its own shape in this backward", where=where)
        source = self.reduces.reduce(group, trained, [part.value for part in parts if part is not None])
        self.reduce_scatter_states.append(source)
