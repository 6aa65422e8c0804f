"""When modules run: the calls, forward and backward, at which ZeRO-3 gathers parameters and lets go of them.

deepspeed/runtime/zero/parameter_offload.py puts a hook before and after the forward and the backward of every module, with
parameters of its own or not. Modules are read off the operators' paths: one is entered with its first operator. A module's
backward ends when its input's gradient is there; a module whose input needs none (an embedding) has no such end, and keeps its
parameters until the backward is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from memir.rewrite.flow import Flow


@dataclass(frozen=True, slots=True)
class Call:
    """A module's run: operators `start` to `end`, and the storages of the parameters it holds."""

    path: str
    parameters: tuple[str, ...]
    start: int
    end: int
    forward: bool
    ends: bool = True  # False: nothing tells that it is over


def module_calls(flow: Flow, parameters: Container[str], order: Mapping[str, int]) -> list[Call]:
    """All calls in the order in which they begin; a module's parameters by `order`."""
    held: dict[str, set[str]] = defaultdict(set)
    for position, op in enumerate(flow.ops):
        if flow.is_forward(position):
            held[op.path] |= {name for name in flow.reads(position) if name in parameters}
    own = {path: tuple(sorted(names, key=order.__getitem__)) for path, names in held.items() if names}
    calls: list[Call] = []
    of: dict[int, int] = {}  # forward operator -> the call of its module
    for run in _runs(flow):
        again = flow.repeated[run[0]]
        for call, members in _entered([(p, flow.ops[p].path) for p in run], own, forward=True, again=again):
            if again and _is_cut_short(flow, call, run[-1], calls):
                call = replace(call, ends=False)
            of.update(dict.fromkeys(members, len(calls)))
            calls.append(call)
    found = [*calls, *_backward(flow, calls, of, own)]
    return sorted(found, key=lambda c: (c.start, c.path.count(".") + bool(c.path)))


def _is_cut_short(flow: Flow, call: Call, last: int, calls: Iterable[Call]) -> bool:
    """Whether recomputation ends within the module, with the last tensor that is saved: an exception leaves it, and hooks that
    come after a forward do not run (torch/utils/checkpoint.py, `_StopRecomputationError`)."""
    if call.end != last or flow.ops[last].forward_of is None:
        return False
    reached = flow.made[str(flow.ops[last].forward_of)]
    return any(first.path == call.path and first.start <= reached < first.end for first in calls)


def _runs(flow: Flow) -> list[list[int]]:
    """Forward operators that run one after another: a forward phase, or what one checkpoint computes again."""
    phases: dict[str, list[int]] = defaultdict(list)
    for position, op in enumerate(flow.ops):
        if flow.phase[position].endswith("forward") and not op.opcode.startswith("memir."):
            phases[flow.phase[position]].append(position)
    return [*phases.values(), *(list(s) for s in flow.segments)]


def _entered(
    places: Iterable[tuple[int, str]], own: Mapping[str, tuple[str, ...]], *, forward: bool, again: bool = False
) -> list[tuple[Call, list[int]]]:
    """The modules that are entered on the way along these (operator, path), each with its own operators."""
    opened: list[tuple[Call, list[int]]] = []
    found: list[tuple[Call, list[int]]] = []
    for position, path in places:
        while opened and not _within(path, opened[-1][0].path):
            found.append(opened.pop())
        for prefix in _modules(path, again=again):
            if not any(call.path == prefix for call, _ in opened):
                opened.append((Call(prefix, own.get(prefix, ()), position, position, forward), []))
        opened = [(replace(call, end=position), members) for call, members in opened]
        if opened and opened[-1][0].path == path:
            opened[-1][1].append(position)
    return sorted([*found, *opened], key=lambda item: (item[0].start, len(item[0].path)))


def _within(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _modules(path: str, *, again: bool) -> list[str]:
    """The modules on the way to `path`, the root first; a list of modules is never called. What is computed again begins with a
    layer."""
    parts = path.split(".") if path else []
    found = [] if again else [""]
    layered = False
    for number in range(1, len(parts) + 1):
        layered = layered or parts[number - 1].isdigit()
        listed = number < len(parts) and parts[number].isdigit()
        if not listed and (layered or not again):
            found.append(".".join(parts[:number]))
    return found


def _backward(flow: Flow, calls: list[Call], of: Mapping[int, int], own: Mapping[str, tuple[str, ...]]) -> list[Call]:
    """The backward of each call with parameters, and the modules that are entered on the way."""
    ranges: dict[tuple[str, int], list[int]] = defaultdict(list)
    places: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for position, op in enumerate(flow.ops):
        forward = None if op.forward_of is None else flow.made.get(op.forward_of)
        if not flow.gradient[position] or forward is None:
            continue
        places[flow.phase[position]].append((position, flow.ops[forward].path))
        if forward in of and calls[of[forward]].parameters:
            ranges[flow.phase[position], of[forward]].append(position)
    found = []
    for (_, number), positions in ranges.items():
        call = calls[number]
        embeds = any(flow.ops[p].opcode.startswith("aten.embedding") for p in range(call.start, call.end + 1))
        found.append(Call(call.path, call.parameters, min(positions), max(positions), forward=False, ends=not embeds))
    for phase in places.values():
        found += [call for call, _ in _entered(phase, {}, forward=False) if call.path not in own]
    return found
