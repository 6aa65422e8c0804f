"""Gradients taken out of a step: what backward, autograd's saved tensors and the optimizer are without some parameters.

What PyTorch does when a parameter has requires_grad=False, or when a stretch of the forward runs under no_grad:
- an operator whose operands require no gradient makes no autograd node and saves nothing; its results die where the last Python
  reference goes (`drops`; `memir.rewrite.ends`);
- a node runs only what its remaining edges need (torch/csrc/autograd/generated, `should_compute_output`), so a tensor that was
  saved for the gradient of a frozen weight alone is not saved;
- the optimizer's lists lack the frozen parameters, their gradients and states.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memir.ir.core import Kind, Program
from memir.ir.layout import new_strides
from memir.ir.size import ZERO
from memir.rewrite.changes import LISTS, STACKS, Changes, beyond
from memir.rewrite.ends import ends_of
from memir.rewrite.flow import Flow, in_place
from memir.rewrite.rebuild import rebuilt

# Attention kernels of CUDA make no logarithms of the sums where nothing requires a gradient: their second result is empty
# (aten/src/ATen/native/transformers/attention.cpp, `compute_logsumexp`).
_LOGSUMEXP = ("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention")
# A view saves nothing; where it does, a torch.autograd.Function begins there, which keeps whatever it was told to.
_VIEWS = ("aten.view", "aten.t", "aten.transpose.int", "aten.permute", "aten.expand", "aten.reshape", "aten._unsafe_view")
# Backward operators that leave a gradient out when it is not needed (`output_mask`, derivatives.yaml); others make all.
_MASKED = ("native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward", "convolution_backward")


def without_gradients(flow: Flow, frozen: Collection[str], no_grad: Collection[int] = ()) -> tuple[Program, list[int]]:
    """The flat program when the parameters in the storages `frozen` are not trained, and its operators' positions before.

    `no_grad`: positions of forward operators (and of their recomputed twins) that run under no_grad whatever they read.
    InconclusiveError where an operator would be left without one of its operands.
    """
    if not frozen and not no_grad:
        return flow.program, list(range(len(flow.ops)))
    changes = Changes(flow, frozenset(frozen))
    trained = {s.name for s in flow.program.storages if s.kind == Kind.PARAMETER} - changes.frozen
    requiring = flow.requiring(trained, frozenset(no_grad))
    _drop_nodes(changes, requiring)
    _drop_unneeded(changes)
    changes.saves = _saves(changes, requiring)
    _shorten_recomputation(changes)
    drop_from_optimizer(changes)
    _drop_clones(changes, requiring)
    _drop_sums(changes, requiring)
    return rebuilt(changes, ends_of(changes))


def _drop_nodes(changes: Changes, requiring: set[int]) -> None:
    """Nodes that are not there, what they would have made, and additions that lose one side."""
    flow = changes.flow
    for position, op in enumerate(flow.ops):
        if not flow.phase[position].endswith("backward") or flow.repeated[position]:
            continue
        node = flow.node[position]
        dead = node is not None and flow.made[node] not in requiring and flow.phase[flow.made[node]].endswith("forward")
        if dead and flow.gradient[position]:
            changes.remove(position)
            continue
        lost = [o for o in op.operands if changes.now(o) in changes.gone]
        if not lost:
            continue
        if flow.gathers[position] and len(lost) == 1:
            changes.pass_through(position, next(o for o in op.operands if o not in lost))
        elif flow.gathers[position] or flow.gradient[position]:
            changes.remove(position)
        else:
            raise beyond(op)


def _drop_unneeded(changes: Changes) -> None:
    """From the end backwards: what no gradient of a trained parameter is made of is not computed."""
    flow = changes.flow
    storages = {s.name for s in flow.program.storages if s.live_out and s.name not in changes.owned}
    gradients = {s.name for s in flow.program.storages if s.kind == Kind.GRADIENT and s.name not in changes.owned}
    gradients |= {changes.takes_over[g] for g in gradients if g in changes.takes_over}
    storages |= gradients
    values: set[str] = set()
    for position in range(len(flow.ops) - 1, -1, -1):
        op = flow.ops[position]
        if position in changes.removed:
            continue
        if not (flow.gradient[position] or flow.gathers[position]):
            if flow.is_forward(position):
                values |= {changes.now(o) for o in op.operands}
            continue
        kept = []
        for value in op.results:
            born = flow.born.get(value.storage)
            content = value.storage in storages and born is not None and flow.phase[born].endswith("backward")
            writes = born == position or in_place(op.opcode) or value.storage in gradients  # others are views, needed by name
            if (content and writes) or value.name in values:
                kept.append(value)
        if not kept and (op.results or not in_place(op.opcode)):
            changes.remove(position)
            continue
        for value in op.results:
            if flow.born.get(value.storage) == position:
                storages.discard(value.storage)
        if op.opcode.split(".")[1] in _MASKED:
            changes.keep_results(position, tuple(kept))
        for operand in op.operands:
            now = changes.now(operand)
            values.add(now)
            storages.add(flow.storage[now])


def _saves(changes: Changes, requiring: set[int]) -> dict[int, tuple[str, ...]]:
    """What the operators still save: their node is there, and its backward still reads it (or never did)."""
    flow = changes.flow
    saves: dict[int, tuple[str, ...]] = {}
    for position, op in enumerate(flow.ops):
        if not op.saves or position not in requiring or position in flow.checkpoint:
            continue
        group = flow.group.get(flow.node[position] or "", [])
        remaining = [p for p in group if p not in changes.removed]
        if group and not remaining:
            continue
        if op.opcode in _VIEWS:
            saves[position] = op.saves
            continue
        kept = []
        for name in op.saves:
            reading = [p for p in group if name in flow.reads(p)]
            if not reading or any(p not in changes.removed for p in reading):
                kept.append(name)
        if kept:
            saves[position] = tuple(kept)
    recomputed = {number for number, segment in enumerate(flow.segments) if any(p in saves for p in segment)}
    for position, number in flow.checkpoint.items():  # a checkpoint holds its arguments as long as anything within is saved
        if number in recomputed and flow.ops[position].saves:
            saves[position] = flow.ops[position].saves
    return saves


def _shorten_recomputation(changes: Changes) -> None:
    """torch/utils/checkpoint.py, _recomputation_hook: recomputation ends when the last saved tensor is back.

    A weight's view is in no `saves`. That it was saved is seen by a node that still reads it, whose own forward operator is
    where recomputation stops, after all before it.
    """
    flow = changes.flow
    stops = [-1] * len(flow.segments)
    number = {position: k for k, segment in enumerate(flow.segments) for position in segment}
    for position, op in enumerate(flow.ops):
        node = flow.node[position]
        if not flow.gradient[position] or node is None or position in changes.removed:
            continue
        for operand in op.operands:
            k = number.get(flow.made.get(changes.now(operand), -1))
            if k is not None:
                stops[k] = max(stops[k], flow.made[node])
    for segment, stop in zip(flow.segments, stops, strict=True):
        needed = (p for p in segment if p in changes.saves or flow.made[flow.ops[p].forward_of or ""] < stop)
        last = max(needed, default=-1)
        for position in segment:
            if position > last:
                changes.remove(position)


def drop_from_optimizer(changes: Changes) -> None:
    """Lists without the frozen parameters, their gradients and states; an operator on these alone goes."""
    flow = changes.flow
    lost = changes.owned | changes.frozen
    dead: set[str] = set()
    for position, op in enumerate(flow.ops):
        if flow.phase[position].endswith(("forward", "backward")) or not op.operands:
            continue
        out = [o in dead or flow.storage[o] in lost for o in op.operands]
        if not any(out):
            continue
        if all(out) or not op.opcode.startswith((*LISTS, *STACKS)):
            changes.removed.add(position)
            dead |= {r.name for r in op.results}
        elif not op.opcode.startswith(STACKS):
            changes.kept_results[position] = tuple(r for k, r in enumerate(op.results) if not out[k])
            dead |= {r.name for k, r in enumerate(op.results) if out[k]}
    changes.gone |= dead | {value for value, storage in flow.storage.items() if storage in changes.owned}


def _drop_clones(changes: Changes, requiring: set[int]) -> None:
    """An operator that writes in place over what its own backward reads clones that first, only if there is a backward
    (torch/csrc/autograd/generated/VariableType, `original_self`)."""
    flow = changes.flow
    clones = [p for p, op in enumerate(flow.ops) if op.opcode == "aten.clone" and p not in requiring and flow.is_forward(p)]
    readers: dict[str, set[int]] = {r.name: set() for p in clones for r in flow.ops[p].results}
    for position, op in enumerate(flow.ops if clones else ()):
        for operand in op.operands:
            if operand in readers:
                readers[operand].add(position)
    for position in clones:
        reading = {p for r in flow.ops[position].results for p in readers[r.name]}
        if reading and reading <= changes.removed:
            changes.remove(position)


def _drop_sums(changes: Changes, requiring: set[int]) -> None:
    for position, op in enumerate(changes.flow.ops):
        if op.opcode not in _LOGSUMEXP or position in requiring or position in changes.removed:
            continue
        first, sums, *rest = op.results
        shape = (*sums.shape[:2], ZERO, *sums.shape[3:])
        changes.kept_results[position] = (first, replace(sums, shape=shape, strides=new_strides(shape)), *rest)
        changes.empty.add(sums.storage)
