"""Gradients that tensor parallelism leaves in another layout than their parameters': FSDP2 brings them there itself.

The tensor-parallel pass has the optimizer's operators copy or all-reduce such a gradient each time they read it.
FSDP's post_backward redistributes it once, before it is reduced over the data ranks, and the optimizer reads that
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_get_grad_inner_tensor`).
"""

from __future__ import annotations

from collections.abc import Iterable

from memir.ir.core import Op
from memir.parallel.edit import Edit
from memir.parallel.groups import Member
from memir.parallel.shards import in_optimizer

_REDUCES = ("_c10d_functional.all_reduce", "_c10d_functional.all_reduce_coalesced")
_COPIES = "aten.clone"


def without_redistributions(edit: Edit, members: Iterable[Member]) -> dict[str, str]:
    """Takes them out of the optimizer's phase; parameter -> the operator that redistributes its gradient."""
    flow = edit.flow
    owner = {m.gradient: m.parameter for m in members if m.gradient is not None}
    found: dict[str, str] = {}
    names: dict[str, str] = {}
    for position, op in enumerate(flow.ops):
        if not in_optimizer(flow.phase[position]):
            continue
        storages = {flow.storage[o] for o in op.operands}
        if op.opcode in (_COPIES, *_REDUCES) and len(storages) == 1 and storages <= owner.keys():
            found[owner[storages.pop()]] = _COPIES if op.opcode == _COPIES else _REDUCES[0]
            names.update({r.name: op.operands[min(k, len(op.operands) - 1)] for k, r in enumerate(op.results)})
            edit.put(position, Op("memir.free", frees=op.frees))
            for result in op.results:
                edit.take_free(result.storage)
                edit.forget(result.storage)
        elif any(o in names for o in op.operands):
            edit.rename(position, names)
    return found
