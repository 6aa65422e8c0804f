"""Checkpoints of a flat program: what each holds, what runs again and when, and how long its nodes keep what they took.

torch/utils/checkpoint.py, `_checkpoint_hook` and `_recomputation_hook`:
- while a layer's forward runs, what autograd would save is replaced by an empty holder, so it dies where Python lets it go; the
  frame of the call keeps the arguments until the last node of the layer has been released;
- the first node that wants a saved tensor runs the layer again, up to the last tensor that is saved (early stop). An operator
  saves its inputs before its kernel runs and its results after (tools/autograd/gen_variable_type.py), so the last one may not
  run at all;
- a node takes its tensors out (`holder.handles[gid] = None`), so they die when its function returns. That is before
  `validate_outputs` sums gradients to the shape of what was broadcast and casts them to its type
  (torch/csrc/autograd/engine.cpp, call_function).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op
from memir.rewrite.flow import Flow, in_place

_FITTING = ("aten.sum.", "aten._to_copy")  # what validate_outputs does to a gradient


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the forward that is one checkpoint: its operators' positions, and those whose results are kept."""

    positions: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    path: str = ""  # of the layer


@dataclass(frozen=True, slots=True)
class Frame:
    """One checkpoint that backward comes to."""

    stretch: Stretch
    held: frozenset[str]  # the arguments' storages
    savers: tuple[int, ...]  # operators of the stretch whose nodes keep something
    unnamed: Mapping[str, int]  # storages that nodes keep which no operator is known to have made, and their functions' ends
    again: frozenset[int]  # operators that run again
    reached: frozenset[int]  # those, and the ones before the end whose results were kept
    at: int  # the backward operator in front of which they run
    end: int  # the operator after which the last node is released


def frame_of(flow: Flow, stretch: Stretch, passed: frozenset[str], *, early_stop: bool) -> Frame | None:
    """The stretch's checkpoint; None where nothing in it is saved: then nothing holds the frame after the call.

    `passed`: storages that it is called with although it does not read them. A number that is multiplied by is saved as a
    tensor, but without hooks (torch/csrc/autograd/saved_variable.cpp, is_wrapped_number).
    """
    ops = flow.ops
    savers = [p for p in stretch.positions if ops[p].saves]
    unnamed = _unnamed(flow, stretch)
    taking = [group for p in savers if (group := node_of(flow, p))]
    taking += [[p for p in range(len(ops)) if _takes(flow, p, unnamed)]] if unnamed else []
    taking = [group for group in taking if group]
    if not taking:
        return None
    last = max((*savers, *(python_end(flow, name) for name in unnamed))) if early_stop else stretch.positions[-1]
    runs = last not in savers or not early_stop or bool(_results_saved(flow, last))
    reached = frozenset(p for p in stretch.positions if p < last or (p == last and runs))
    again = {p for p in reached - stretch.kept if not ops[p].opcode.startswith("memir.")}
    return Frame(
        stretch,
        arguments(flow, stretch) | passed,
        tuple(savers),
        unnamed,
        frozenset(again),
        reached,
        min(min(group) for group in taking),
        max(max(group) for group in taking),
    )


def _unnamed(flow: Flow, stretch: Stretch) -> dict[str, int]:
    """Storages of the stretch that a node keeps which no operator is known to have made, with the end of that node's function.

    A function with a backward of its own (torch.autograd.Function) runs its forward without gradients, and an operator in place
    saves a copy of what it overwrites. So no operator saves them; still they live on into backward.
    """
    inside = set(stretch.positions)
    found = {}
    for position in stretch.positions:
        for value in flow.ops[position].results:
            name = value.storage
            end = flow.freed.get(name)
            if (
                name in flow.savers
                or flow.born.get(name) != position
                or end is None
                or not flow.phase[end].endswith("backward")
            ):
                continue
            if flow.dropped.get(name) in inside or _copied(flow, position):
                start = end
                while start > 0 and flow.gradient[start - 1] and flow.node[start - 1] is None:
                    start -= 1
                found[name] = _before_fitting(flow, list(range(start, end + 1)))
    return found


def _copied(flow: Flow, position: int) -> bool:
    """Whether it is the copy of what the next operator overwrites (`original_self` in tools/autograd/gen_variable_type.py)."""
    op = flow.ops[position]
    after = flow.ops[position + 1] if position + 1 < len(flow.ops) else Op("")
    return op.opcode == "aten.clone" and in_place(after.opcode) and after.operands[:1] == op.operands


def _takes(flow: Flow, position: int, storages: Collection[str]) -> bool:
    return flow.gradient[position] and flow.node[position] is None and not flow.reads(position).isdisjoint(storages)


def node_of(flow: Flow, position: int) -> list[int]:
    """The backward operators of a forward operator's node."""
    return flow.group.get(flow.node[position] or "", [])


def returned(flow: Flow, saver: int, frame: Frame) -> int:
    """The last operator of a node's own function. A node that backward does not come to keeps its tensors as the frame does."""
    group = node_of(flow, saver)
    if not group:
        return frame.end
    return _before_fitting(flow, group)


def _before_fitting(flow: Flow, group: list[int]) -> int:
    """The last operator of a group before those that fit gradients to their tensors."""
    after = len(group)
    for k in range(len(group) - 1, 0, -1):
        opcode = flow.ops[group[k]].opcode
        if opcode.startswith(_FITTING):
            after = k
        elif opcode != "aten.view":
            break
    fitted: set[str] = set()
    for position in group[after:]:
        op = flow.ops[position]
        if not op.opcode.startswith(_FITTING) and not fitted & set(op.operands):
            return group[-1]
        fitted |= {r.name for r in op.results}
    return group[after - 1]


def python_end(flow: Flow, name: str) -> int:
    """Where the last Python reference to a storage goes; of one that lives on, behind the last operator."""
    born = flow.born.get(name)
    if name not in flow.dropped and born is not None and _copied(flow, born):
        return born + 1
    return flow.dropped.get(name, flow.freed.get(name, len(flow.ops)))


def check_passed(flow: Flow, stretch: Stretch, passed: Collection[str]) -> None:
    """UsageError where a storage cannot be an argument of the stretch."""
    known = {s.name for s in flow.program.storages}
    for name in sorted(passed):
        if name not in known:
            raise UsageError(f"passed={name}: the program has no storage of that name")
        if not flow.born.get(name, -1) < stretch.positions[0] <= python_end(flow, name):
            raise UsageError(f"passed={name}: it is not there when the layer is called", where=f"@{stretch.path}")


def arguments(flow: Flow, stretch: Stretch) -> frozenset[str]:
    """What the stretch reads that was there before, parameters and buffers left out."""
    made = {r.storage for p in stretch.positions for r in flow.ops[p].results if flow.born.get(r.storage) == p}
    parameters = {s.name for s in flow.program.storages if s.kind == Kind.PARAMETER}
    buffers = {s.name for s in flow.program.storages if s.kind == Kind.BUFFER}
    read = {name for p in stretch.positions for name in flow.reads(p)} - made - parameters - buffers
    for name in read:
        born = flow.born.get(name)
        if born is not None and flow.ops[born].opcode == "aten._to_copy" and flow.reads(born) <= parameters:
            # aten/src/ATen/autocast_mode.cpp, cached_cast: each recomputation has a cache of its own and casts again.
            raise InconclusiveError(
                "a layer uses a parameter that was cast outside of it: it may be cast again with the layer",
                where=f"@{stretch.path}",
            )
    return frozenset(read)


def _results_saved(flow: Flow, position: int) -> set[str]:
    """The storages that an operator saves after its kernel: its own results."""
    op = flow.ops[position]
    return {r.storage for r in op.results if flow.born.get(r.storage) == position or in_place(op.opcode)} & set(op.saves)
