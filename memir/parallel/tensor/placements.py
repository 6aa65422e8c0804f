"""The program with marks becomes one rank's: divisions followed through forward and backward, marks become collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Value
from memir.ir.dims import base_name
from memir.ir.opset import scratch_of, scratch_target
from memir.ir.reshape import Part
from memir.ir.size import Size
from memir.parallel.edit import Edit
from memir.parallel.tensor.boundaries import Marked
from memir.parallel.tensor.chains import Plan
from memir.parallel.tensor.linears import SHAPES
from memir.parallel.tensor.local import Local
from memir.parallel.tensor.marks import MARK
from memir.parallel.tensor.walk import Graph, Reach, beyond, walk
from memir.rewrite.flow import Flow

LOSS = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")


@dataclass(slots=True)
class Placed:
    """A program with marks and what each of its values is on a rank."""

    graph: Graph
    local: Local
    reach: Reach
    sequence: frozenset[str]  # values whose tokens are divided
    edit: Edit = field(init=False)

    def __post_init__(self) -> None:
        self.edit = Edit(self.graph.flow)


def placed(marks: Marked, plan: Plan, degree: Size, *, sequence: bool, loss: bool) -> Placed:
    """Follows every division. InconclusiveError names the operator that has no dimension rule, or needs a dimension whole."""
    graph = Graph(Flow(marks.program))
    flow = graph.flow
    seeds = [(x.table, c.reach.parts[x.table]) for c in plan.chains for x in (*c.columns, *c.rows) if x.table in c.reach.parts]
    seeds += [(x.table, Part(1)) for x in plan.heads] + [(x.table, Part(0)) for x in plan.lookups]

    def crosses(position: int, name: str) -> bool:
        opcode = flow.ops[position].opcode
        return opcode != MARK and not (loss and base_name(opcode) in LOSS)

    if loss:
        ends = (op for op in flow.ops if base_name(op.opcode) in ("_log_softmax", "_log_softmax_backward_data"))
        seeds += [(op.results[0].name, Part(len(op.results[0].shape) - 1)) for op in ends]
    reach = walk(graph, seeds, crosses)
    _check(graph, reach)
    divided = frozenset[str]()
    if sequence:
        partial = _partial(graph, reach)
        marks_of_sums = [
            op.results[0]
            for p, op in enumerate(flow.ops)
            if op.opcode == MARK and flow.is_forward(p) and op.operands[0] in partial
        ]
        tokens = _tokens(graph, plan)
        more = [(v.name, Part(dim)) for v in marks_of_sums if (dim := _sequence_dim(v, tokens)) is not None]
        whole = walk(graph, [*seeds, *more], crosses)
        _check(graph, whole)
        divided = frozenset(name for name in whole.parts if name not in reach.parts)
        reach = whole
    reach.partial = {name: reach.partial.get(name, -1) for name in _partial(graph, reach)}
    return Placed(graph, Local(graph, reach.parts, degree), reach, divided)


def _tokens(graph: Graph, plan: Plan) -> Size | None:
    """Tokens in a sequence: token ids are [B, S]. None without a lookup."""
    ids = (graph.values[graph.flow.ops[graph.flow.made[x.result]].operands[1]] for x in plan.lookups)
    return next((v.shape[1] for v in ids if len(v.shape) == 2), None)


def _sequence_dim(value: Value, tokens: Size | None) -> int | None:
    """The dimension of [B, S, D] or [S, B, D] that has the tokens of a sequence; None for another tensor."""
    if len(value.shape) != 3:
        return None
    return next((dim for dim in (1, 0) if value.shape[dim] == tokens), None)


def _check(graph: Graph, reach: Reach) -> None:
    if reach.barriers:
        raise beyond(graph, reach.barriers[0])


def _partial(graph: Graph, reach: Reach) -> set[str]:
    """The values that are partial sums: those that products and lookups make, views and the engine's sums of them.

    InconclusiveError where something else reads one. A partial gradient of a parameter is the optimizer's business.
    """
    flow = graph.flow
    found = set(reach.partial)
    for position, op in enumerate(flow.ops):
        if not op.operands or not found & set(op.operands) or op.opcode == MARK:
            continue
        base = base_name(op.opcode)
        if graph.kinds[flow.storage[next(o for o in op.operands if o in found)]] == Kind.GRADIENT:
            found |= {r.name for r in op.results if base in (*SHAPES, "t")}
        elif base in (*SHAPES, "t") or (flow.gathers[position] and set(op.operands) <= found):
            found |= {r.name for r in op.results}
        elif base != "embedding":
            where = " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))
            raise InconclusiveError("a partial sum is read before it is reduced", where=where)
    return found


def resize(state: Placed, positions: Iterable[int]) -> None:
    """Every value and storage becomes the rank's, and so does the workspace of operators."""
    graph, edit, local = state.graph, state.edit, state.local
    for value in graph.flow.program.values:
        new = local.value(value)
        if new != value:
            edit.values[value.name] = new
    for storage in graph.flow.program.storages:
        smaller = local.storage(storage)
        if smaller != storage:
            edit.storages[storage.name] = smaller
    for position in positions:
        op = edit.op(position)
        results = tuple(local.value(graph.values[r.name]) for r in op.results)
        if results != op.results or any(o in local.parts for o in op.operands):
            scratch = _scratch(op, local, graph.operands(op), results)
            edit.put(position, replace(op, results=results, scratch=scratch))


def _scratch(op: Op, local: Local, before: list[Value], results: tuple[Value, ...]) -> Size:
    """The rank's workspace. Attention's is a multiple of the heads, which is all that is known where their size is a symbol."""
    if op.scratch.terms:
        if target := scratch_target(op, before):
            return scratch_of(target, op.opcode, [local.value(v) for v in before], results)
        if "attention" in op.opcode:
            return local.piece(op.scratch)
    return op.scratch
