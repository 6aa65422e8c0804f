"""The optimizer's phase of a rank: states of its shards, and gradients that are not placed as their parameters are.

DTensor's operators redistribute an operand whose placement is not the others', each time it is one (torch/distributed/tensor/
_dispatch.py, `redistribute_local_args`). So it goes with the gradient of a vocabulary-parallel table, which
embedding_dense_backward makes whole on each rank, and, with sequence parallelism, with the norms' gradients, which are sums
over the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ZERO, Size
from memir.parallel.shards import Shard, gradients_of, in_optimizer, shard_states
from memir.parallel.tensor.chains import Plan
from memir.parallel.tensor.gradients import place, read_placed
from memir.parallel.tensor.names import fresh
from memir.parallel.tensor.placements import Placed


def optimizer(state: Placed, plan: Plan, *, in_backward: bool) -> None:
    """States and the step itself. `in_backward`: gradients are placed as their parameters are where backward makes them."""
    flow, local = state.graph.flow, state.local
    kinds = {s.name: s.kind for s in flow.program.storages}
    divided = (v for v in flow.program.values if kinds[v.storage] == Kind.PARAMETER and v.name in local.parts)
    whole = {x.weight for x in plan.lookups} - {x.weight for x in plan.heads}
    uncut = {s.name for owner, s in gradients_of(flow).items() if owner in whole}
    partial = {flow.storage[v] for v in state.reach.partial if kinds[flow.storage[v]] == Kind.GRADIENT}
    gradients = place(state, uncut, partial) if in_backward else {}
    shards = [Shard(v.storage, local.value(v).shape, v.dtype, gradients.get(v.storage)) for v in divided]
    shard_states(state.edit, shards)
    if in_backward:
        read_placed(state, gradients)
    else:
        _Moving(state, uncut).run()


@dataclass(slots=True)
class _Moving:
    state: Placed
    uncut: set[str]  # storages of gradients that are whole, of parameters that are not

    def run(self) -> None:
        flow, edit = self.state.graph.flow, self.state.edit
        kinds = {s.name: s.kind for s in flow.program.storages}
        partial = {flow.storage[v] for v in self.state.reach.partial if kinds[flow.storage[v]] == Kind.GRADIENT}
        taken = set(flow.storage) | {s.name for s in flow.program.storages}
        whole = {v.storage: v for v in self.state.graph.values.values() if v.storage in self.uncut}
        for position, op in enumerate(flow.ops):
            if not in_optimizer(flow.phase[position]) or op.opcode.startswith("memir."):
                continue
            gradients = [k for k, o in enumerate(op.operands) if flow.storage[o] in self.uncut | partial]
            if not gradients:
                continue
            now = edit.op(position)
            others = {kinds[flow.storage[o]] for o in op.operands} - {Kind.GRADIENT, Kind.TEMPORARY}
            if not others:  # norms and scales of gradients leave them where they are
                edit.put(position, replace(now, results=tuple(self._unchanged(r) for r in now.results)))
                continue
            operands = list(now.operands)
            moved = {k: self._moved(self.state.graph.values[op.operands[k]], whole, taken) for k in gradients}
            for k, value in moved.items():
                operands[k] = value.name
            self._insert(position, op, moved)
            frees = (*now.frees, *(v.storage for v in moved.values()))
            edit.put(position, replace(now, operands=tuple(operands), frees=frees))

    def _moved(self, gradient: Value, whole: Mapping[str, Value], taken: set[str]) -> Value:
        """A tensor for the gradient as its parameter is placed."""
        cut = gradient.storage in self.uncut
        shape = self._local(whole[gradient.storage]) if cut else gradient.shape
        name = fresh(gradient.storage, ".cut" if cut else ".tp", taken)
        self.state.edit.declare(Storage(name, product(shape) * ITEMSIZE[gradient.dtype], Kind.COLLECTIVE))
        return Value(name, gradient.dtype, shape, contiguous(shape), ZERO, name)

    def _insert(self, position: int, op: Op, moved: Mapping[int, Value]) -> None:
        """Copies of pieces one by one; sums over the ranks one by one, which for a list is told in one operator: nothing dies
        between them."""
        like = Op("", path=op.path, source=op.source)
        sums = {k: v for k, v in moved.items() if self.state.graph.flow.storage[op.operands[k]] not in self.uncut}
        if len(sums) > 1:
            names = tuple(op.operands[k] for k in sums)
            coalesced = replace(
                like, opcode="_c10d_functional.all_reduce_coalesced", operands=names, results=tuple(sums.values())
            )
            self.state.edit.before(position, coalesced)
        for k, value in moved.items():
            opcode = "_c10d_functional.all_reduce" if k in sums else "aten.clone"
            if k not in sums or len(sums) == 1:
                self.state.edit.before(position, replace(like, opcode=opcode, operands=(op.operands[k],), results=(value,)))

    def _unchanged(self, result: Value) -> Value:
        return self.state.graph.values[result.name] if result.storage in self.uncut else result

    def _local(self, gradient: Value) -> tuple[Size, ...]:
        first = gradient.shape[0]
        return (self.state.local.piece(first), *gradient.shape[1:])
