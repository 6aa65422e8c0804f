"""FSDP2's runtime followed hook by hook over a flat step: what fully_shard gathers, holds, reduces and frees, and when.

The methods are named after those of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (FSDPParamGroup) and
_fsdp_state.py (FSDPState) that they follow, as of torch 2.13. Python's references decide when a buffer dies, so what a local
variable holds until its function returns is held here too.
"""

from __future__ import annotations

from dataclasses import replace

from memir.ir.core import Kind, Value
from memir.ir.layout import contiguous, product
from memir.parallel.calls import Call, Pass
from memir.parallel.edit import Edit
from memir.parallel.gathers import Gathers
from memir.parallel.groups import Group, Member
from memir.parallel.hooks import Hooks
from memir.parallel.placed import numbered, suffixed
from memir.parallel.policy import Policy
from memir.parallel.redistributed import without_redistributions
from memir.parallel.reduces import Reduces
from memir.parallel.units import ROOT

_SOURCE = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"


class Runtime(Hooks):
    """FSDPState and FSDPParamGroup; after `run`, `reduces.sharded` has the rank's gradients."""

    def __init__(self, edit: Edit, groups: dict[str, Group], policy: Policy) -> None:
        super().__init__(edit, groups, _SOURCE, summed=policy.sync_last and not policy.reduce_dtype)
        self.policy = policy
        self.last = next((phase for phase in reversed(edit.flow.phase) if phase.endswith("backward")), "")
        members = [member for group in groups.values() for member in group.members]
        self.redistributed = without_redistributions(edit, members)  # parameter -> by which operator
        self.accumulated: dict[str, Value] = {}  # parameter -> FSDPParam.unsharded_accumulated_grad
        self.layers = {group.layer: group for group in groups.values() if group.layer != ROOT}
        self.gathers = Gathers(self.placer, policy, self.whole)
        self.reduces = Reduces(self.placer, policy)
        self.all_gather_state = ""  # FSDPCommContext's, storages
        self.reduce_scatter_states: list[str] = []
        self.post_forward_order: list[Group] = []

    def end_of_backward(self, group: Group, call: Call, one: Pass) -> int | None:
        """RegisterPostBackwardFunction is a node on the inputs."""
        return call.post_backward

    # -- FSDPState

    def pre_forward(self, group: Group) -> None:
        """_pre_forward: gather, wait, gather those that are prefetched by hand."""
        self.unshard(group)
        self.wait_for_unshard(group, forward=True)
        for number in range(1, 1 + self.policy.forward_prefetch):
            if group.layer != ROOT and group.layer + number in self.layers:
                self.unshard(self.layers[group.layer + number])

    def post_forward(self, group: Group) -> None:
        """_post_forward: reshard; the root's lets go of the last all-gather."""
        if group.members:
            if self._reshards(group):
                (self.gathers.to_fewer if self.policy.post_forward else self.reshard)(group)
            group.indices.append(len(self.post_forward_order))
            self.post_forward_order.append(group)
        if group.layer == ROOT and self.all_gather_state:
            self.placer.free(self.all_gather_state)
            self.all_gather_state = ""

    def _reshards(self, group: Group) -> bool:
        if group.layer == ROOT:
            return self.policy.reshard_root
        return self.policy.reshard and not (self.policy.keep_last and group.layer == max(self.layers))

    def pre_backward(self, group: Group) -> None:
        """_pre_backward: gather if it is not there, wait, prefetch."""
        self.unshard(group)
        self.wait_for_unshard(group, forward=False)
        by_hand = range(group.layer - 1, max(-1, group.layer - 1 - self.policy.backward_prefetch), -1)
        ahead = [self.layers[layer] for layer in by_hand if layer in self.layers] if group.layer != ROOT else []
        for other in ahead:
            self.unshard(other)
        if not ahead and group.indices:  # FSDPParamGroup._backward_prefetch
            index = group.indices.pop()
            if index > 0:
                self.unshard(self.post_forward_order[index - 1])

    def final_callback(self) -> None:
        """_root_post_backward_final_callback, with finalize_backward of each group; the root is the first."""
        for group in sorted(self.groups.values(), key=lambda group: group.layer):
            if not group.done:
                self.post_backward(group)
            self.placer.free(*filter(None, (group.pending, group.all_reduce_state)))
            group.done, group.pending, group.all_reduce_state = False, "", ""
            group.indices.clear()
        self.post_forward_order.clear()
        self.placer.free(*self.reduce_scatter_states)
        self.reduce_scatter_states.clear()

    # -- FSDPParamGroup

    def unshard(self, group: Group) -> None:
        """unshard: nothing where an all-gather is under way or the parameters are whole."""
        if group.members and not group.pending and not self.whole.is_whole(group.members[0].parameter):
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

    def post_backward(self, group: Group) -> None:
        """post_backward: reshard, let go of the reduce-scatter before, reduce."""
        if not group.members:
            return
        group.done = True
        is_last = self.flow.phase[self.placer.position] == self.last or not self.policy.sync_last
        gradients = self.gradients(group) if is_last or self.policy.reduce_dtype else []
        gradients = [self._redistribute(group, m, g) for m, g in zip(group.trained, gradients, strict=False)]
        if self.policy.sync_last and self.policy.reduce_dtype:
            gradients = self._accumulate(group, gradients)
        self.reshard(group)
        if not is_last:
            return
        self.placer.free(*self.reduce_scatter_states)
        self.reduce_scatter_states.clear()
        if group.trained:
            self.reduce_scatter_states.append(self.reduces.reduce(group, group.trained, gradients))

    def _redistribute(self, group: Group, member: Member, gradient: Value) -> Value:
        """_get_grad_inner_tensor: a new tensor in the parameter's layout, where the gradient's is another."""
        opcode = self.redistributed.get(member.parameter)
        if opcode is None:
            return gradient
        shape = member.value.shape
        name = suffixed(member.parameter, numbered(".redistributed", group.reductions + 1))
        flat = self.placer.flat(name, gradient.dtype, product(shape), Kind.GRADIENT)
        made = replace(flat, shape=shape, strides=contiguous(shape))
        self.placer.put(opcode, (gradient.name,), [made], [gradient.storage], path=group.path)
        return made

    def _accumulate(self, group: Group, gradients: list[Value]) -> list[Value]:
        """accumulate_unsharded_grad_if_needed and to_accumulated_grad_if_needed: whole gradients add up in reduce_dtype."""
        for member, gradient in zip(group.trained, gradients, strict=True):
            total = self.accumulated.get(member.parameter)
            if total is not None:
                operands = (total.name, gradient.name)
                self.placer.put("aten.add_.Tensor", operands, frees=[gradient.storage], path=group.path)
                continue
            dtype = self.policy.reduce_dtype
            name = suffixed(member.parameter, ".accumulated_grad")
            flat = self.placer.flat(name, dtype, product(gradient.shape), Kind.GRADIENT)
            total = replace(flat, shape=gradient.shape, strides=contiguous(gradient.shape))
            self.placer.put("aten._to_copy", (gradient.name,), [total], [gradient.storage], path=group.path)
            self.accumulated[member.parameter] = total
        return [self.accumulated[m.parameter] for m in group.trained]
