"""Where one rank's part of a product begins and ends: marks put into the flat program, sizes unchanged.

A mark, `tensor.redistribute`, copies a tensor where PyTorch's DTensor changes its placement (torch/distributed/tensor/
_redistribute.py); what it copies from and to is read off the divisions on both sides of it (placements.py), afterwards.
The places are those of `parallelize_module` with the plan that torchtitan and PyTorch's tutorial write (ColwiseParallel,
RowwiseParallel and, with `sequence`, PrepareModuleInput and SequenceParallel; torch/distributed/tensor/parallel/style.py):

- forward: behind a row product and a lookup, which are partial sums; behind the head, whose logits are gathered, unless the
  loss takes them as they are; with `sequence` in front of column products, once for those that are called with one tensor;
- backward: where the gradient of a column product's input is complete; with `sequence` in front of the backward of a row
  product and a lookup; in front of that of a head whose logits were gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError
from memir.ir.core import Program
from memir.ir.dims import base_name
from memir.parallel.tensor.chains import Lookup, Plan
from memir.parallel.tensor.linears import SHAPES, Linear, module_end, parameter_of
from memir.parallel.tensor.marks import Marking
from memir.parallel.tensor.walk import Graph


@dataclass(frozen=True, slots=True)
class Marked:
    """The program with marks, its sizes those of the whole tensors; each operator's origin; sums that are made out of place."""

    program: Program
    origins: list[int]
    apart: frozenset[str]


def marked(graph: Graph, plan: Plan, *, sequence: bool, loss: bool) -> Marked:
    """Puts the marks in. InconclusiveError where the backward of a split product is not where its forward says."""
    work = _Boundaries(graph, sequence)
    rows = [x for chain in plan.chains for x in chain.rows]
    columns = [x for chain in plan.chains for x in chain.columns]
    if sequence:
        work.enter([*columns, *plan.heads])
    for row in rows:
        work.leave(row.exit, row.left)
    for lookup in plan.lookups:
        work.leave(*module_end(graph, lookup.position))
    if not loss:
        for head in plan.heads:
            work.leave(head.exit, head.left)
    work.input_gradients([*columns, *plan.heads])
    if sequence:
        work.output_gradients(rows)
        work.lookup_gradients(plan.lookups)
    if not loss:
        work.output_gradients(plan.heads)
    work.tied_gradients(plan)
    program, origins = work.edit.applied()
    return Marked(program, origins, frozenset(work.apart))


class _Boundaries(Marking):
    """Where the marks are put."""

    def leave(self, value: str, position: int) -> None:
        """A mark behind the operator that ends a module; what died or was dropped with that dies with the mark."""
        op = self.edit.op(position)
        mark = self.copy(value, op)
        moved = replace(mark, frees=(*op.frees, self.flow.storage[value]), drops=op.drops)
        self.edit.put(position, replace(op, frees=(), drops=()))
        self.take_over(value, moved, position)
        self.edit.after(position, moved)

    def enter(self, linears: Iterable[Linear]) -> None:
        """A mark in front of the first of the products that are called with one tensor, in one run of the forward."""
        groups: dict[tuple[str, bool], list[Linear]] = defaultdict(list)
        for linear in linears:
            groups[linear.entry, self.flow.repeated[linear.position]].append(linear)
        for (value, _), group in groups.items():
            self._enter(value, sorted(group, key=lambda x: x.entered))

    def _enter(self, value: str, group: Sequence[Linear]) -> None:
        flow, old = self.flow, self.flow.storage[value]
        first = group[0].entered
        mark = self.copy(value, flow.ops[first])
        new = mark.results[0].storage
        inside: set[int] = set()
        for linear in group:
            inside |= {p for p in range(linear.entered, linear.position + 1) if p in self.mentions[old]}
        for position in inside:
            self.edit.rename(position, {value: mark.results[0].name})
            self.move(position, old, new, results=True, saves=True)
        backward = {p for linear in group for p in self.flow.group.get(self.node_name(linear), ())}
        for position in backward & set(self.mentions[old]):
            self.move(position, old, new, results=True)  # views of what was saved
        self.edit.before(first, mark)
        savers = [p for p in flow.savers.get(old, ()) if p not in inside]
        python = self.python_end(old, first)
        ends = [self.node_end(x) for x in group if old in flow.ops[x.position].saves]
        self.edit.take_free(old)
        self.undrop(old)
        self.free(new, max([python, *ends]), dropped=python)
        self.free(old, max([python, *(self.node_end_of(p) for p in savers)]), dropped=python)

    def input_gradients(self, linears: Iterable[Linear]) -> None:
        """A mark where the gradient of a column product's input is complete: partial sums are added before they are reduced
        where they belong to one DTensor, which is the case with `sequence`."""
        found: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        seen: set[str] = set()
        for linear in linears:
            node = self.node_name(linear)
            if node in seen:
                continue  # a checkpoint's second run has the same backward
            seen.add(node)
            end = self._gradient_of_input(linear)
            if end is not None:
                found[linear.entry, 0 if self.sequence else len(found)].append(end)
        for ends in found.values():
            value, position = self._summed(ends)
            storage = self.edit.op(position).results[0].storage
            op = self.edit.op(position)
            mark = replace(self.copy(value, op), frees=(storage,))
            self.take_over(value, mark, position, storage)
            self.edit.after(position, mark)
            self.accumulate(mark.results[0], position)

    def output_gradients(self, linears: Iterable[Linear]) -> None:
        """A mark in front of the backward of a product whose result was redistributed."""
        seen: set[str] = set()
        for linear in linears:
            node = self.node_name(linear)
            if node in seen:
                continue
            seen.add(node)
            last = self.node_name(linear, linear.left)
            group = sorted({*self.flow.group.get(last, ()), *self.flow.group.get(node, ())})
            if group:
                self.beside(group, max(self.flow.group.get(node, group)))

    def lookup_gradients(self, lookups: Iterable[Lookup]) -> None:
        """A mark in front of the backward of a lookup."""
        for lookup in lookups:
            group = self.flow.group.get(self.flow.ops[lookup.position].results[0].name, [])
            if group:
                self.beside(sorted(group), max(group))

    def tied_gradients(self, plan: Plan) -> None:
        """A table that the head shares: its two gradients meet, and the lookup's, which is whole, is cut first."""
        heads = {h.weight for h in plan.heads}
        for lookup in plan.lookups:
            if lookup.weight not in heads:
                continue
            for position in self.flow.group.get(self.flow.ops[lookup.position].results[0].name, ()):
                for result in self.flow.ops[position].results:
                    self._tied(result.name)

    def _tied(self, gradient: str) -> None:
        """DTensors are added out of place (InputBuffer::add leaves tensor subclasses out)."""
        flow = self.flow
        adding = [p for p in self.graph.readers.get(gradient, ()) if base_name(flow.ops[p].opcode) == "add"]
        for position in adding:
            op = self.edit.op(position)
            mark = self.copy(gradient, op)
            self.edit.rename(position, {gradient: mark.results[0].name})
            self.edit.before(position, mark)
            op = self.edit.op(position)
            self.edit.put(position, replace(op, frees=(*op.frees, mark.results[0].storage)))
            self.apart.add(op.results[0].name)

    def _gradient_of_input(self, linear: Linear) -> tuple[str, int] | None:
        """The value that is the gradient of a module's input, a partial sum, and the operator that makes it."""
        flow = self.flow
        group = flow.group.get(self.node_name(linear), ())
        products = (p for p in sorted(group) if base_name(flow.ops[p].opcode) == "mm")
        reads = (p for p in products if any(parameter_of(self.graph, o) == linear.weight for o in flow.ops[p].operands))
        position = next(reads, None)
        if position is None:
            return None
        views = {self.node_name(linear, p) for p in range(linear.entered, linear.position)}
        value = flow.ops[position].results[0].name
        while True:
            after = next((p for p in self.graph.readers.get(value, ()) if self._is_view_of(p, views)), None)
            if after is None:
                return value, position
            value, position = flow.ops[after].results[0].name, after

    def _is_view_of(self, position: int, nodes: set[str]) -> bool:
        op = self.flow.ops[position]
        return self.flow.gradient[position] and op.forward_of in nodes and base_name(op.opcode) in SHAPES

    def _summed(self, ends: list[tuple[str, int]]) -> tuple[str, int]:
        """Partial sums added up by the engine: the value of the last addition and its operator."""
        open_ends = dict(ends)
        for position in range(min(open_ends.values()), len(self.flow.ops)):
            if len(open_ends) == 1:
                break
            op = self.flow.ops[position]
            if not self.flow.gathers[position] or not set(op.operands) <= open_ends.keys():
                continue
            for operand in op.operands:
                del open_ends[operand]
            open_ends[op.results[0].name] = position
            self.apart.add(op.results[0].name)
        if len(open_ends) != 1:
            where = self.flow.ops[ends[0][1]].path
            raise InconclusiveError(
                "the gradients of an input of split products are not added up where memir looks", where=where
            )
        return open_ends.popitem()
