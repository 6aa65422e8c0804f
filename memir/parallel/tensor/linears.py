"""The matrix products with weights in a flat program's forward, and where their modules begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from memir.ir.core import Kind
from memir.ir.dims import base_name
from memir.parallel.tensor.walk import Graph

_PRODUCTS = ("mm", "addmm")
_VIEWS = ("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "_to_copy", "clone", "expand", "unsqueeze", "squeeze")
SHAPES = ("view", "_unsafe_view", "reshape")


@dataclass(frozen=True, slots=True)
class Linear:
    """One product of the forward, or the same product run again by a checkpoint."""

    position: int
    weight: str  # the parameter's storage
    table: str  # the value that it multiplies by, [in, out]
    entry: str  # the value that its module is called with
    entered: int  # the operator that reads it first
    exit: str  # the value that its module returns
    left: int  # the operator that makes that


def parameter_of(graph: Graph, value: str) -> str | None:
    """The parameter's storage that a value is a view or a cast of, None where it is neither."""
    while True:
        storage = graph.flow.storage[value]
        if graph.kinds[storage] == Kind.PARAMETER:
            return storage
        made = graph.flow.made.get(value)
        op = graph.flow.ops[made] if made is not None else None
        if op is None or base_name(op.opcode) not in _VIEWS or not op.operands:
            return None
        value = op.operands[0]


def linears_of(graph: Graph) -> list[Linear]:
    """All of them in order, those that a checkpoint runs again included."""
    found = []
    for position, op in enumerate(graph.flow.ops):
        if not graph.flow.is_forward(position) or base_name(op.opcode) not in _PRODUCTS:
            continue
        weight = parameter_of(graph, op.operands[-1])
        if weight is None:
            continue
        entry, entered = op.operands[-2], position
        while (made := graph.flow.made.get(entry)) is not None and _is_shape(graph, made, position):
            entry, entered = graph.flow.ops[made].operands[0], made
        last, left = module_end(graph, position)
        found.append(Linear(position, weight, op.operands[-1], entry, entered, last, left))
    return found


def module_end(graph: Graph, position: int) -> tuple[str, int]:
    """The value that the module returns in which an operator makes its result, and the operator that makes it: views follow."""
    value, left = graph.flow.ops[position].results[0].name, position
    while True:
        after = next((p for p in graph.readers.get(value, ()) if p > left and _is_shape(graph, p, position)), None)
        if after is None:
            return value, left
        value, left = graph.flow.ops[after].results[0].name, after


def _is_shape(graph: Graph, position: int, of: int) -> bool:
    """Whether it is a reshape within the same module and the same run as the operator `of`."""
    flow, op = graph.flow, graph.flow.ops[position]
    same = flow.phase[position] == flow.phase[of] and op.path == flow.ops[of].path and bool(op.path)
    return same and flow.is_forward(position) and base_name(op.opcode) in SHAPES
