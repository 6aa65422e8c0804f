"""When each unit's module is called in a flat step, and when autograd is through with the call.

FSDP hangs four hooks on a unit: before and after its module's forward, when the gradient of its outputs is there, and when
those of its inputs are (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_pre_forward`, `_post_forward`, `_pre_backward`;
_fsdp_param_group.py, RegisterPostBackwardFunction). Here each hook is a place beside an operator.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memir.errors import InconclusiveError
from memir.ir.core import Kind
from memir.parallel.units import ROOT
from memir.rewrite.cut import layers_of, trained
from memir.rewrite.flow import Flow


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a unit's module: its first and last operator in forward, and in the backward of that.

    `pre_backward` is None where nothing is differentiated, or its outputs need no gradient; `post_backward`, the place where
    its inputs' gradients are there, is None where they need none; `through` is the last operator of its backward.
    """

    path: str  # of the module, "" for the root
    layer: int  # or ROOT
    first: int
    last: int
    pre_backward: int | None
    post_backward: int | None
    through: int | None
    again: tuple[int, int] | None = None  # where a checkpoint runs it again, first and last operator
    differentiated: int | None = None  # the first operator of its backward that is not of that


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and its backward: the root's call first, then those of the units as they run, outer ones first."""

    forward: str  # names of phases
    backward: str  # "" where there is none
    calls: tuple[Call, ...]
    end: int  # the last operator of the backward that autograd runs, or of the forward


def passes_of(flow: Flow, inner: Sequence[str] = ()) -> tuple[Pass, ...]:
    """The forward and backward passes of a step in order; `inner`: paths of modules within the layers that are units too.

    UsageError (of layers_of) where the model has no layers.
    """
    layers = layers_of(flow)
    paths = {f"{layers.path}.{k}": k for k in range(layers.depth)}
    within = re.compile(rf"{re.escape(layers.path)}\.(\d+)\.")
    paths |= {path: int(found.group(1)) if (found := within.match(path)) else ROOT for path in inner}
    requiring = flow.requiring(trained(flow), ())
    inside: dict[str, list[int]] = defaultdict(list)
    for position, phase in enumerate(flow.phase):
        if not flow.ops[position].opcode.startswith("memir."):
            inside[phase].append(position)
    found_passes = []
    for phase in [phase for phase in inside if phase.endswith("forward")]:
        backward = phase.removesuffix("forward") + "backward"
        run = inside.get(backward, [])
        calls = _calls(flow, paths, requiring, inside[phase], run)
        found_passes.append(Pass(phase, backward if run else "", calls, run[-1] if run else inside[phase][-1]))
    return tuple(found_passes)


def _calls(
    flow: Flow, paths: Mapping[str, int], requiring: set[int], forward: list[int], backward: list[int]
) -> tuple[Call, ...]:
    modules = [p for p in forward if flow.ops[p].path or flow.ops[p].source] or forward  # the loop's own have no line
    places, differentiated = _within(flow, paths, modules), _within(flow, paths, backward)
    order = sorted(places, key=lambda path: (places[path][0], len(path)))
    layers = [path for path in order if path.rpartition(".")[2].isdigit() and paths[path] != ROOT]
    for before, after in pairwise(path for path in layers if not any(path.startswith(f"{other}.") for other in layers)):
        if places[before][-1] > places[after][0]:
            raise InconclusiveError("two layers run at the same time", where=f"@{before}")
    last = modules[-1]
    calls = [Call("", ROOT, modules[0], last, next((p for p in backward if _is_inside(flow, p, last)), None), None, None)]
    for path in order:
        first, final = places[path][0], places[path][-1]
        run = differentiated.get(path, [])
        needs = bool(run) and _input_needs_gradient(flow, requiring, places[path], run)
        through = run[-1] if run else None
        begun = run[0] if run else None
        repeated = _again(flow, run)
        again = (repeated[0], repeated[-1]) if repeated else None
        other = run[len(repeated)] if len(repeated) < len(run) else None
        calls.append(Call(path, paths[path], first, final, begun, through if needs else None, through, again, other))
    return tuple(calls)


def _within(flow: Flow, paths: Mapping[str, int], positions: Sequence[int]) -> dict[str, list[int]]:
    """Unit -> the operators that run in its module, or differentiate it, or run it again."""
    found: dict[str, list[int]] = defaultdict(list)
    for position in positions:
        path = flow.ops[position].path
        while path:
            if path in paths:
                found[path].append(position)
            path = path.rpartition(".")[0]
    return found


def _again(flow: Flow, run: Sequence[int]) -> Sequence[int]:
    """The operators that begin a layer's backward and are those of its forward, in that order: a checkpoint runs it again.

    (Flow.repeated has those of which something is needed.)
    """
    if not any(flow.repeated[p] for p in run):
        return ()
    last = max(count for count, p in enumerate(run) if flow.repeated[p])
    before = flow.made.get(flow.ops[run[last]].forward_of or "", -1)
    for count, position in enumerate(run[last + 1 :], last + 1):  # the last ones are read by nothing
        op = flow.ops[position]
        forward = flow.made.get(op.forward_of or "", -1)
        if forward <= before or flow.ops[forward].opcode != op.opcode:
            return run[:count]
        before = forward
    return run


def _is_inside(flow: Flow, position: int, last: int) -> bool:
    """Whether a backward operator differentiates what the root's module computed, and not what the loop did with it."""
    op = flow.ops[position]
    if op.forward_of is not None:
        return flow.made[op.forward_of] <= last
    return bool(op.path)


def _input_needs_gradient(flow: Flow, requiring: set[int], forward: list[int], backward: list[int]) -> bool:
    """Whether autograd goes through the layer's input: what is read from outside requires a gradient.

    Where it does because a hook says so and not for a parameter (PEFT's enable_input_require_grads), the gradients of the
    input meet at the end of the layer's backward.
    """
    inner = set(forward)
    parameters = {s.name for s in flow.program.storages if s.kind == Kind.PARAMETER}
    for position in forward:
        for operand in flow.ops[position].operands:
            made = flow.made.get(operand)
            if made is not None and made not in inner and made in requiring and flow.storage[operand] not in parameters:
                return True
    return flow.gathers[backward[-1]]
