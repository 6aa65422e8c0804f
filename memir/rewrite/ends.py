"""When the storages of a changed step die: at the last of what holds them.

A storage is held by Python (until its `drops`, or its free where autograd never held it), by each autograd node that saved it
(until the node has run: torch/csrc/autograd/engine.cpp, `release_variables`), by a checkpoint that was called with it (until
all nodes within have run), and by the engine while it is a gradient on its way. Where none of that changed, it dies as before.
"""

from __future__ import annotations

from collections import defaultdict

from memir.rewrite.changes import Changes
from memir.rewrite.cut import NUMBERED


def ends_of(changes: Changes) -> dict[str, int | None]:
    """Storage -> the position of the operator after which it dies, None for one that lives on."""
    flow = changes.flow
    touched: dict[str, list[int]] = defaultdict(list)
    for position, op in enumerate(flow.ops):
        if position in changes.removed:
            continue
        for operand in op.operands:
            touched[flow.storage[changes.now(operand)]].append(position)
        for value in changes.results(position):
            touched[flow.storage[changes.now(value.name)]].append(position)
    heirs = {changes.heir(lost): lost for lost in changes.takes_over}
    ends: dict[str, int | None] = {}
    for storage in flow.program.storages:
        source = heirs.get(storage.name, storage.name)
        base = flow.freed.get(source)
        if storage.live_out or base is None:
            ends[storage.name] = base
        else:
            ends[storage.name] = _end(changes, storage.name, base, touched.get(storage.name, []))
    return ends


def _end(changes: Changes, name: str, base: int, touched: list[int]) -> int:
    flow = changes.flow
    before = flow.savers.get(name, [])
    after = [p for p in before if name in changes.saves.get(p, ()) and p not in changes.removed]
    born = flow.born.get(name)
    if not after and born is not None and flow.phase[born].endswith("forward") and _is_cast(changes, born):
        return _cast_end(changes, name, base)
    if touched and _lost_its_leaf(changes, name, base):
        return _node_end(changes, touched[-1])
    if len(before) == len(after) and base not in changes.removed:
        return base
    if not flow.phase[base].endswith(("forward", "backward")):
        return _next_turn(changes, base)
    if not before and (held := _function_end(changes, base)) is not None:
        return held
    dropped = _python_end(changes, name)
    if dropped is not None and not after and (not touched or touched[-1] <= dropped):
        return dropped  # nothing holds it beyond the last Python reference
    argument = dropped is not None and any(p in flow.checkpoint for p in after)
    if len(before) == len(after) and not argument:  # what a checkpoint was called with goes with the last of its nodes
        around = [base, *flow.group.get(flow.node[base] or "", [])]
        if not any(_touches(changes, name, p) for p in around):
            return base  # something else than this node let it go
        last = next((p for p in reversed(touched) if p <= base), None)
        releases = [end for position in after for end in _release(changes, position)]
        return base if last is None else max([_node_end(changes, last), *releases])
    if dropped is None:
        return base
    return max([dropped, *touched[-1:], *(end for position in after for end in _release(changes, position))])


def _touches(changes: Changes, name: str, position: int) -> bool:
    flow = changes.flow
    return name in flow.reads(position) or name in {r.storage for r in flow.ops[position].results}


def _lost_its_leaf(changes: Changes, name: str, base: int) -> bool:
    """Whether a gradient was kept as the `.grad` of a tensor that backward does not come to any more: of an embedding's output
    that was made to require one (transformers' enable_input_require_grads)."""
    flow = changes.flow
    born = flow.born.get(name)
    if born is None or not flow.phase[born].endswith("backward") or flow.gradient[base] or flow.gathers[base]:
        return False
    if flow.freed.get(name) != base:
        return False  # it lies in another one's place, and lives as long
    last = next(p for p in range(base, born - 1, -1) if _touches(changes, name, p))
    return last in changes.removed and flow.phase[last].endswith("backward")  # a parameter's own gradient is read later


def _next_turn(changes: Changes, base: int) -> int:
    """Where an optimizer's loop, one parameter at a time, takes the same variable for the next one that is trained."""
    flow = changes.flow
    lost = flow.ops[base]
    for position in range(base + 1, len(flow.ops)):
        op = flow.ops[position]
        if position not in changes.removed and (op.opcode, op.source) == (lost.opcode, lost.source):
            return position
    return base


def _release(changes: Changes, saver: int) -> list[int]:
    """The operator after which what this one saved is let go: of its node, or of all nodes of its checkpoint that saved."""
    flow = changes.flow
    nodes = [flow.node[saver]]
    if saver in flow.checkpoint:
        segment = flow.segments[flow.checkpoint[saver]]
        named = [(p in changes.saves, flow.ops[p].forward_of) for p in segment]
        nodes = [node for saves, node in named if saves or _unpacks(changes, node or "")]
    group = [p for node in nodes for p in flow.group.get(node or "", []) if p not in changes.removed]
    return [max(group)] if group else []


def _unpacks(changes: Changes, node: str) -> bool:
    """Whether a node reads what it saved, or a weight, and not gradients alone."""
    flow = changes.flow
    for position in flow.group.get(node, ()):
        if position not in changes.removed:
            makers = [flow.made.get(changes.now(operand)) for operand in flow.ops[position].operands]
            if any(m is None or flow.is_forward(m) for m in makers):
                return True
    return False


def _node_end(changes: Changes, position: int) -> int:
    """The last operator of the same node: its incoming gradients and what it made for nobody die when it has run."""
    flow = changes.flow
    group = flow.group.get(flow.node[position] or "", []) if flow.gradient[position] else []
    return max((p for p in group if p not in changes.removed), default=position)


def _function_end(changes: Changes, base: int) -> int | None:
    """The last operator that still runs of the model's own autograd function (torch.autograd.Function) that has `base`.

    No operator `saves` what such a function gives to ctx.save_for_backward, and its backward's operators have no forward one:
    they stand in a row. It keeps all that it saved until it has run, whichever gradients are needed
    (torch/csrc/autograd/python_function.cpp, PyNode::release_variables).
    """
    flow = changes.flow

    def belongs(position: int) -> bool:
        op, last = flow.ops[position], flow.ops[base]
        return flow.gradient[position] and flow.node[position] is None and (op.path, op.source) == (last.path, last.source)

    start = end = base
    while belongs(start) and start > 0 and belongs(start - 1):
        start -= 1
    while belongs(end) and end + 1 < len(flow.ops) and belongs(end + 1):
        end += 1
    return max((p for p in range(start, end + 1) if belongs(p) and p not in changes.removed), default=None)


def _python_end(changes: Changes, name: str) -> int | None:
    """Where the last Python reference to a saved storage goes; for a recomputed one, where it went the first time."""
    flow = changes.flow
    born = flow.born.get(name)
    if name in flow.dropped:
        end = flow.dropped[name]
        return _cast_end(changes, name, end) if born is not None and _is_cast(changes, born) else end
    if born is not None and flow.ops[born].opcode == "memir.alloc" and flow.phase[born].endswith("forward"):
        return _call_end(changes, name)
    if born is None or not flow.repeated[born]:
        return None
    number = next(k for k, r in enumerate(flow.ops[born].results) if r.storage == name)
    twin = flow.ops[flow.made[flow.ops[born].forward_of or ""]].results[number].storage
    forward_end = flow.dropped.get(twin, flow.freed.get(twin))
    if forward_end is None or not flow.phase[forward_end].endswith("forward"):
        return None
    last = born
    for position in range(born, len(flow.ops)):
        if flow.repeated[position]:
            if flow.made[flow.ops[position].forward_of or ""] > forward_end:
                break
            last = position
    return last


def _call_end(changes: Changes, name: str) -> int | None:
    """The last operator of the layer whose checkpoint made this for itself: a generator's state dies as the call returns."""
    flow = changes.flow
    savers = [p for p in flow.savers.get(name, ()) if p in flow.checkpoint]
    match = NUMBERED.match(flow.ops[savers[0]].path) if len(savers) == 1 else None
    if match is None:
        return None
    layer, phase = match.group(0).rstrip("."), flow.phase[savers[0]]
    inside = (p for p, op in enumerate(flow.ops) if flow.phase[p] == phase and f"{op.path}.".startswith(f"{layer}."))
    return max(inside)


def _is_cast(changes: Changes, position: int) -> bool:
    """Whether it makes another type of a frozen parameter."""
    flow = changes.flow
    return flow.ops[position].opcode == "aten._to_copy" and flow.reads(position) <= changes.frozen


def _cast_end(changes: Changes, name: str, end: int) -> int:
    """aten/src/ATen/autocast_mode.cpp, cached_cast: only of parameters that require a gradient is the cast kept until the
    end of the forward; another one dies with the operator that was called (a linear layer ends in a view)."""
    flow = changes.flow
    born = flow.born[name]
    last = max(p for p in range(born, end + 1) if p == born or (flow.is_forward(p) and name in flow.reads(p)))
    if last < end and flow.ops[last + 1].opcode in ("aten.view", "aten._unsafe_view"):
        product, view = flow.ops[last], flow.ops[last + 1]
        same_call = (product.path, product.source) == (view.path, view.source)  # a view by the caller comes after the call
        if same_call and flow.reads(last + 1) <= {r.storage for r in product.results}:
            return last + 1
    return last
