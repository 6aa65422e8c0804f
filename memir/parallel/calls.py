"""When each unit's module is called in a flat step, and when autograd is through with the call.

FSDP hangs four hooks on a unit: before and after its module's forward, when the gradient of its outputs is there, and when
those of its inputs are (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_pre_forward`, `_post_forward`, `_pre_backward`;
_fsdp_param_group.py, RegisterPostBackwardFunction). Here each hook is a place beside an operator.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from memir.errors import InconclusiveError
from memir.ir.core import Kind
from memir.parallel.units import ROOT
from memir.rewrite.cut import Layers, layers_of, trained
from memir.rewrite.flow import Flow


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a unit's module: its first and last operator in forward, and in the backward of that.

    `pre_backward` is None where nothing is differentiated, or its outputs need no gradient; `post_backward` is None where its
    inputs need none, so that only the end of backward is known.
    """

    layer: int  # or ROOT
    first: int
    last: int
    pre_backward: int | None
    post_backward: int | None


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and its backward: the root's call first, then the layers', in the order in which they run."""

    forward: str  # names of phases
    backward: str  # "" where there is none
    calls: tuple[Call, ...]
    end: int  # the last operator of the backward that autograd runs, or of the forward


def passes_of(flow: Flow) -> tuple[Pass, ...]:
    """The forward and backward passes of a step in order. UsageError (of layers_of) where the model has no layers."""
    layers = layers_of(flow)
    requiring = flow.requiring(trained(flow), ())
    inside: dict[str, list[int]] = defaultdict(list)
    for position, phase in enumerate(flow.phase):
        inside[phase].append(position)
    forwards = [phase for phase in inside if phase.endswith("forward")]
    found = []
    for phase in forwards:
        backward = phase.removesuffix("forward") + "backward"
        found.append(_pass(flow, layers, requiring, phase, inside[phase], backward, inside.get(backward, [])))
    return tuple(found)


def _pass(
    flow: Flow, layers: Layers, requiring: set[int], phase: str, forward: list[int], name: str, backward: list[int]
) -> Pass:
    within = re.compile(rf"{re.escape(layers.path)}\.(\d+)(?:\.|$)")
    own = [p for p in forward if not flow.ops[p].opcode.startswith("memir.")]
    modules = [p for p in own if flow.ops[p].path or flow.ops[p].source] or own  # the loop's own operators have no line
    places: dict[int, list[int]] = defaultdict(list)
    for position in modules:
        match = within.match(flow.ops[position].path)
        if match:
            places[int(match.group(1))].append(position)
    order = sorted(places, key=lambda layer: places[layer][0])
    for before, after in pairwise(order):
        if places[before][-1] > places[after][0]:
            raise InconclusiveError("two layers run at the same time", where=f"@{layers.path}.{before}")
    run = [p for p in backward if not flow.ops[p].opcode.startswith("memir.")]
    differentiated = _differentiated(flow, run, within)
    last = modules[-1]
    begun = next((p for p in run if _is_inside(flow, p, last)), None)
    calls = [Call(ROOT, modules[0], last, begun, None)]
    for layer in order:
        first, final = places[layer][0], places[layer][-1]
        of_layer = differentiated.get(layer, [])
        if not of_layer:
            calls.append(Call(layer, first, final, None, None))
            continue
        needs = _input_needs_gradient(flow, requiring, places[layer], of_layer)
        calls.append(Call(layer, first, final, of_layer[0], of_layer[-1] if needs else None))
    end = run[-1] if run else forward[-1]
    return Pass(phase, name if run else "", tuple(calls), end)


def _differentiated(flow: Flow, backward: list[int], within: re.Pattern[str]) -> dict[int, list[int]]:
    """Layer -> the operators of a backward that differentiate it, or run it again."""
    found: dict[int, list[int]] = defaultdict(list)
    for position in backward:
        match = within.match(flow.ops[position].path)
        if match:
            found[int(match.group(1))].append(position)
    return found


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
