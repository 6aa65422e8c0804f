"""The plan, derived from the graph: which matrix products chain, and which dimension they share.

A chain is a dimension that some products with weights make and others sum over, with nothing between that needs all of it:
queries, keys and values (by heads) with the output projection; gate and up (by width) with down. The first are split by column,
the last by row (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3), and the vocabulary by rows of the embedding
and columns of the head. It is read off the forward by following the dimension that a product sums over through the operators'
dimension rules (memir/ir/dims.py) to everything that is tied to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memir.errors import InconclusiveError
from memir.ir.core import Kind
from memir.ir.dims import base_name
from memir.ir.reshape import Part
from memir.parallel.tensor.linears import Linear, linears_of, parameter_of
from memir.parallel.tensor.walk import Crossing, Graph, Reach, beyond, walk

LOSSES = ("_log_softmax", "nll_loss_forward")
_ATTENTION = ("_scaled_dot_product", "_flash_attn", "_softmax", "_safe_softmax")


@dataclass(frozen=True, slots=True)
class Chain:
    """Products that share a divided dimension: positions in the forward (and again, in a checkpoint's second run)."""

    columns: tuple[Linear, ...]
    rows: tuple[Linear, ...]
    of: Literal["attention", "mlp"]
    reach: Reach  # of the forward


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table of embeddings: the forward operator that reads it, and the parameter's storage."""

    position: int
    weight: str
    table: str  # the value that it reads, [vocabulary, width]
    result: str  # the value that it makes


@dataclass(frozen=True, slots=True)
class Plan:
    """What is split: chains by heads and widths, tables of embeddings and the head by the vocabulary."""

    chains: tuple[Chain, ...]
    lookups: tuple[Lookup, ...]
    heads: tuple[Linear, ...]

    def text(self) -> str:
        """One line a parameter: `layers.0.mlp.up.weight column`, in the order of the forward."""
        lines = [(x.position, f"{x.weight} vocabulary") for x in self.lookups]
        lines += [(x.position, f"{x.weight} vocabulary") for x in self.heads]
        for chain in self.chains:
            lines += [(x.position, f"{x.weight} column") for x in chain.columns]
            lines += [(x.position, f"{x.weight} row") for x in chain.rows]
        return "\n".join(dict.fromkeys(text for _, text in sorted(lines)))


def plan_of(graph: Graph) -> Plan:
    """The plan.

    InconclusiveError where no products chain, for an operator between two that has no dimension rule, and for what the plan
    would leave whole or split in two ways: experts, adapters.
    """
    linears = linears_of(graph)
    first = [x for x in linears if graph.flow.phase[x.position].endswith("forward")]
    by_position = {x.position: x for x in first}
    chains: list[Chain] = []
    taken: set[int] = set()
    for linear in first:
        if linear.position in taken:
            continue
        reach = walk(graph, _summed(graph, linear), _in_forward(graph), patient=False)
        if any(not b.unknown for b in reach.barriers):
            continue
        if reach.barriers:
            raise beyond(graph, reach.barriers[0])
        chain = _chain(graph, reach, by_position)
        if chain is not None:
            chains.append(chain)
            mine = {x.position for x in (*chain.columns, *chain.rows)}
            if both := taken & mine:
                where = f"{by_position[min(both)].weight} @{graph.flow.ops[min(both)].path}"
                raise InconclusiveError("a product is within two chains, as those of adapters are", where=where)
            taken |= mine
    _refuse_experts(graph)
    if not chains:
        raise InconclusiveError(
            "no matrix products chain: there is nothing to split", where=f"program @{graph.flow.program.name}"
        )
    lookups = tuple(
        Lookup(p, weight, op.operands[0], op.results[0].name)
        for p, op in enumerate(graph.flow.ops)
        if graph.flow.is_forward(p)
        and base_name(op.opcode) == "embedding"
        and (weight := parameter_of(graph, op.operands[0])) is not None
    )
    heads = tuple(x for x in first if x.position not in taken and _makes_logits(graph, x))
    return Plan(tuple(_with_second_runs(graph, c, linears) for c in chains), lookups, heads)


def _refuse_experts(graph: Graph) -> None:
    """Experts' weights are stacked, [experts, out, in]: splitting those is another plan."""
    for value in graph.flow.program.values:
        if graph.kinds[value.storage] == Kind.PARAMETER and len(value.shape) > 2:
            message = f"tensor-parallel: a parameter of {len(value.shape)} dimensions, as experts have, cannot be split yet"
            raise InconclusiveError(message, where=value.storage, hint="expert-parallel{degree=...}  splits the experts")


def _summed(graph: Graph, linear: Linear) -> list[tuple[str, Part]]:
    """The dimension that a product sums over, in both of its operands."""
    a, b = graph.flow.ops[linear.position].operands[-2:]
    return [(a, Part(len(graph.values[a].shape) - 1)), (b, Part(0))]


def _in_forward(graph: Graph) -> Crossing:
    def crosses(position: int, name: str) -> bool:
        return graph.flow.phase[position].endswith("forward")

    return crosses


def _chain(graph: Graph, reach: Reach, linears: dict[int, Linear]) -> Chain | None:
    columns: list[Linear] = []
    rows: list[Linear] = []
    attention = False
    for position in sorted(reach.crossed):
        op = graph.flow.ops[position]
        attention = attention or base_name(op.opcode).startswith(_ATTENTION)
        linear = linears.get(position)
        if linear is None:
            continue
        part = reach.parts.get(op.operands[-1])
        if part is None:
            return None  # its tokens are divided, not its weight
        (rows if part.dim == 0 else columns).append(linear)
    owned = {graph.kinds[graph.flow.storage[name]] for name in reach.parts}
    if not columns or not rows or owned & {Kind.BUFFER, Kind.INPUT}:
        return None
    return Chain(tuple(columns), tuple(rows), "attention" if attention else "mlp", reach)


def _makes_logits(graph: Graph, linear: Linear) -> bool:
    """Whether the loss takes its softmax over what the product makes."""
    result = graph.flow.ops[linear.position].results[0]
    reach = walk(graph, [(result.name, Part(len(result.shape) - 1))], _in_forward(graph), patient=True)
    return any(base_name(graph.flow.ops[b.position].opcode) in LOSSES for b in reach.barriers)


def _with_second_runs(graph: Graph, chain: Chain, linears: list[Linear]) -> Chain:
    """The chain with the products that a checkpoint runs again."""
    flow = graph.flow

    def also(group: tuple[Linear, ...]) -> tuple[Linear, ...]:
        names = {flow.ops[x.position].results[0].name for x in group}
        return (*group, *(x for x in linears if flow.repeated[x.position] and flow.ops[x.position].forward_of in names))

    return Chain(also(chain.columns), also(chain.rows), chain.of, chain.reach)
