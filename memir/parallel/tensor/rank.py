"""One rank's program of a step under tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.reshape import quotient
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.shards import in_optimizer
from memir.parallel.tensor.boundaries import marked
from memir.parallel.tensor.chains import Chain, Plan, plan_of
from memir.parallel.tensor.collectives import redistribute
from memir.parallel.tensor.optimizer import optimizer
from memir.parallel.tensor.placements import Placed, placed, resize
from memir.parallel.tensor.sums import apart
from memir.parallel.tensor.vocabulary import biases, lookups, losses
from memir.parallel.tensor.walk import Graph
from memir.rewrite.flow import Flow

AXIS = "tensor-parallel"


def one_rank(
    program: Program, degree: Size, *, sequence: bool, loss: bool, placed_gradients: bool = False
) -> tuple[Program, list[int]]:
    """The flat program of one of `degree` ranks, and each operator's origin.

    UsageError: heads, a width, a vocabulary or a sequence that does not divide by the degree. InconclusiveError: nothing to
    split, or an operator that meets a division and has no rule.
    """
    graph = Graph(Flow(program))
    plan = plan_of(graph)
    conditions = check_divides(graph, plan, degree)
    marks = marked(graph, plan, sequence=sequence, loss=loss)
    state = placed(marks, plan, degree, sequence=sequence, loss=loss)
    flow = state.graph.flow
    resize(state, [p for p in range(len(flow.ops)) if not in_optimizer(flow.phase[p])])
    redistribute(state)
    lookups(state, plan)
    biases(state, plan)
    if loss:
        losses(state)
    optimizer(state, plan, in_backward=placed_gradients)
    new, origins = state.edit.applied(((AXIS, degree),))
    sums = set(marks.apart)
    if sequence:
        sums |= {r.name for p, op in enumerate(flow.ops) if flow.gathers[p] for r in op.results if r.name in state.sequence}
        conditions += divides(_tokens(state), degree, "tokens of a sequence", "")
    new = replace(new, dims=tuple(dict.fromkeys((*new.dims, *sorted(degree.symbols())))))
    return replace(apart(new, sums), domain=tuple(dict.fromkeys((*new.domain, *conditions)))), [
        marks.origins[o] for o in origins
    ]


def _tokens(state: Placed) -> Size:
    name = next(n for n in state.sequence if len(state.graph.values[n].shape) == 3)
    value = state.graph.values[name]
    return value.shape[state.reach.parts[name].dim]


def check_divides(graph: Graph, plan: Plan, degree: Size) -> list[str]:
    """The conditions under which heads, widths and vocabulary divide by the degree. UsageError says which number does not."""
    found: list[str] = []
    for chain in plan.chains:
        where = graph.flow.ops[chain.columns[0].position].path
        if chain.of == "attention":
            heads = _heads(graph, chain)
            for extent, what in ((heads[-1], "query heads"), (heads[0], "key-value heads")):
                found += divides(extent, degree, what, where)
        for linear in chain.columns:
            if linear.table not in chain.reach.parts:
                continue  # a second run
            part = chain.reach.parts[linear.table]
            extent = graph.values[linear.table].shape[part.dim]
            found += divides(quotient(extent, part.outer) or extent, degree, f"columns of {linear.weight}", where)
    for lookup in plan.lookups:
        rows = graph.values[lookup.table].shape[0]
        found += divides(rows, degree, f"rows of {lookup.weight}", graph.flow.ops[lookup.position].path)
    for head in plan.heads:
        rows = graph.values[head.table].shape[-1]
        found += divides(rows, degree, f"rows of {head.weight}", graph.flow.ops[head.position].path)
    return found


def _heads(graph: Graph, chain: Chain) -> list[Size]:
    """The numbers of heads in a chain, ascending: a tensor with heads has a dimension of its own for them, [B, H, S, D]."""
    found: set[Size] = set()
    for name, part in chain.reach.parts.items():
        value = graph.values[name]
        if len(value.shape) >= 4 and part.outer is ONE:
            found.add(value.shape[part.dim])
    return sorted(found, key=lambda size: (size.is_constant, size.constant, size.text())) or [ZERO]


def divides(extent: Size, degree: Size, what: str, where: str) -> list[str]:
    """What has to hold for a number to divide, nothing where it does. UsageError that says what does not."""
    if not degree.is_constant:
        return [f"{degree} >= 2", *([f"{degree} divides {extent}"] if extent.terms else [])]
    if not extent.is_constant:
        whole = all(coefficient % degree.constant == 0 for _, coefficient in extent.terms)
        return [] if whole else [f"{extent if len(extent.terms) == 1 else f'({extent})'} % {degree} == 0"]
    if extent.constant % degree.constant:
        raise UsageError(
            f"tensor-parallel: {extent.constant} {what} do not divide by degree {degree}",
            where=f"@{where}" if where else "",
            hint=f"degrees that do: {', '.join(str(d) for d in range(2, 65) if extent.constant % d == 0) or 'none up to 64'}",
        )
    return []
