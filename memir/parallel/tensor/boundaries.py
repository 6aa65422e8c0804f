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
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Program, Storage, Value
from memir.ir.dims import base_name
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous
from memir.ir.size import ZERO
from memir.parallel.edit import Edit
from memir.parallel.shards import product
from memir.parallel.tensor.chains import Lookup, Plan
from memir.parallel.tensor.linears import SHAPES, Linear, module_end, parameter_of
from memir.parallel.tensor.names import fresh
from memir.parallel.tensor.walk import Graph
from memir.rewrite.flow import Flow

MARK = "tensor.redistribute"


@dataclass(frozen=True, slots=True)
class Marked:
    """The program with marks, its sizes those of the whole tensors; each operator's origin; sums that are made out of place."""

    program: Program
    origins: list[int]
    apart: frozenset[str]


def marked(graph: Graph, plan: Plan, *, sequence: bool, loss: bool) -> Marked:
    """Puts the marks in. InconclusiveError where the backward of a split product is not where its forward says."""
    work = _Marking(graph, plan, sequence)
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


@dataclass(slots=True)
class _Marking:
    graph: Graph
    plan: Plan
    sequence: bool
    edit: Edit = field(init=False)
    mentions: dict[str, list[int]] = field(init=False)  # storage -> the operators that name it or a value in it
    names: set[str] = field(init=False)  # of values
    storages: set[str] = field(init=False)
    values: dict[str, Value] = field(init=False)  # as they are now
    read: set[str] = field(default_factory=set)  # storages that marks read
    apart: set[str] = field(default_factory=set)  # sums that are made out of place

    @property
    def flow(self) -> Flow:
        """The program before."""
        return self.graph.flow

    def __post_init__(self) -> None:
        self.edit = Edit(self.flow)
        found: dict[str, list[int]] = defaultdict(list)
        for position, op in enumerate(self.flow.ops):
            named = {self.flow.storage[o] for o in op.operands} | {r.storage for r in op.results}
            for name in named | {*op.frees, *op.drops, *op.saves}:
                found[name].append(position)
        self.mentions = found
        self.values = dict(self.graph.values)
        self.names = set(self.flow.storage)
        self.storages = {s.name for s in self.flow.program.storages}

    # -- the places

    def leave(self, value: str, position: int) -> None:
        """A mark behind the operator that ends a module; what died or was dropped with that dies with the mark."""
        op = self.edit.op(position)
        mark = self._copy(value, op)
        moved = replace(mark, frees=(*op.frees, self.flow.storage[value]), drops=op.drops)
        self.edit.put(position, replace(op, frees=(), drops=()))
        self._take_over(value, moved, position)
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
        mark = self._copy(value, flow.ops[first])
        new = mark.results[0].storage
        inside: set[int] = set()
        for linear in group:
            inside |= {p for p in range(linear.entered, linear.position + 1) if p in self.mentions[old]}
        for position in inside:
            self.edit.rename(position, {value: mark.results[0].name})
            self._move(position, old, new, results=True, saves=True)
        backward = {p for linear in group for p in self.flow.group.get(self._node_name(linear), ())}
        for position in backward & set(self.mentions[old]):
            self._move(position, old, new, results=True)  # views of what was saved
        self.edit.before(first, mark)
        savers = [p for p in flow.savers.get(old, ()) if p not in inside]
        python = self._python_end(old, first)
        ends = [self._node_end(x) for x in group if old in flow.ops[x.position].saves]
        self.edit.take_free(old)
        self._undrop(old)
        self._free(new, max([python, *ends]), dropped=python)
        self._free(old, max([python, *(self._node_end_of(p) for p in savers)]), dropped=python)

    def input_gradients(self, linears: Iterable[Linear]) -> None:
        """A mark where the gradient of a column product's input is complete: partial sums are added before they are reduced
        where they belong to one DTensor, which is the case with `sequence`."""
        found: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        seen: set[str] = set()
        for linear in linears:
            node = self._node_name(linear)
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
            mark = replace(self._copy(value, op), frees=(storage,))
            self._take_over(value, mark, position, storage)
            self.edit.after(position, mark)
            self._accumulate(mark.results[0], position)

    def output_gradients(self, linears: Iterable[Linear]) -> None:
        """A mark in front of the backward of a product whose result was redistributed."""
        seen: set[str] = set()
        for linear in linears:
            node = self._node_name(linear)
            if node in seen:
                continue
            seen.add(node)
            last = self._node_name(linear, linear.left)
            group = sorted({*self.flow.group.get(last, ()), *self.flow.group.get(node, ())})
            if group:
                self._beside(group, max(self.flow.group.get(node, group)))

    def lookup_gradients(self, lookups: Iterable[Lookup]) -> None:
        """A mark in front of the backward of a lookup."""
        for lookup in lookups:
            group = self.flow.group.get(self.flow.ops[lookup.position].results[0].name, [])
            if group:
                self._beside(sorted(group), max(group))

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
            mark = self._copy(gradient, op)
            self.edit.rename(position, {gradient: mark.results[0].name})
            self.edit.before(position, mark)
            op = self.edit.op(position)
            self.edit.put(position, replace(op, frees=(*op.frees, mark.results[0].storage)))
            self.apart.add(op.results[0].name)

    # -- storages

    def _beside(self, group: Sequence[int], end: int) -> None:
        """The gradient that the first operator of a group reads is copied for the group; it dies where it did, or before it."""
        flow = self.flow
        first = group[0]
        value = next((o for o in flow.ops[first].operands if self._is_gradient(o, first)), None)
        if value is None:
            raise InconclusiveError("the backward of a split product reads no gradient", where=flow.ops[first].path)
        op = self.edit.op(first)
        value = op.operands[flow.ops[first].operands.index(value)]
        old = self.values[value].storage
        mark = self._copy(value, op)
        new = mark.results[0].storage
        inside = [p for p in group if p <= end]
        for position in inside:
            self.edit.rename(position, {value: mark.results[0].name})
            self._move(position, old, new, results=True)
        freed = next((p for p in inside if old in self.edit.op(p).frees), None)
        if freed is not None:
            here = self.edit.op(freed)
            self.edit.put(freed, replace(here, frees=tuple(f for f in here.frees if f != old)))
            mark = replace(mark, frees=(old,))
        self.edit.before(first, mark)
        last = self.edit.op(end)
        self.edit.put(end, replace(last, frees=(*last.frees, new)))

    def _take_over(self, value: str, mark: Op, position: int, storage: str | None = None) -> None:
        """The mark's result stands in the value's place in every later operator, and its storage in the value's storage's."""
        old, copy = storage or self.flow.storage[value], mark.results[0]
        if old in self.read - {self.values[value].storage}:
            raise InconclusiveError("a split product's result is the next one's input", where=mark.path)
        for later in list(self.mentions[old]):
            if later <= position:
                continue
            self.edit.rename(later, {value: copy.name})
            self._move(later, old, copy.storage, results=True, saves=True, ends=True)
            self.mentions[copy.storage].append(later)

    def _move(
        self, position: int, old: str, new: str, *, results: bool = False, saves: bool = False, ends: bool = False
    ) -> None:
        """Mentions of a storage in one operator become those of another."""
        op = self.edit.op(position)

        def swap(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(new if n == old else n for n in names)

        if results:
            op = replace(op, results=tuple(replace(r, storage=new) if r.storage == old else r for r in op.results))
            self.values |= {r.name: r for r in op.results}
        if saves:
            op = replace(op, saves=swap(op.saves))
        if ends:
            op = replace(op, frees=swap(op.frees), drops=swap(op.drops))
        self.edit.put(position, op)

    def _accumulate(self, copy: Value, after: int) -> None:
        """What a reduction returns is owned by nobody else, so the next gradient is added into it
        (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace)."""
        if self.sequence:
            return
        for position in self.mentions[copy.storage]:
            op = self.edit.op(position)
            if position <= after or not self.flow.gathers[position] or op.opcode != "aten.add.Tensor":
                continue
            if op.operands[0] != copy.name or copy.storage not in op.frees:
                continue
            total = op.results[0].storage
            self.edit.put(
                position, replace(op, opcode="aten.add_.Tensor", frees=tuple(f for f in op.frees if f != copy.storage))
            )
            for later in list(self.mentions[total]):
                self._move(later, total, copy.storage, results=True, saves=True, ends=True)
                self.mentions[copy.storage].append(later)
            self.edit.forget(total)
            return

    def _copy(self, value: str, beside: Op) -> Op:
        """A mark whose result is a new tensor like the value. It belongs where `beside` does, and is named after it."""
        like = self.values[value]
        old = self.edit.storage(like.storage)
        nbytes = product(like.shape) * ITEMSIZE[like.dtype]
        kind = old.kind if old.kind == Kind.ACTIVATION else Kind.COLLECTIVE
        new = self.edit.declare(Storage(fresh(beside.results[0].name, ".tp", self.storages), nbytes, kind, old.device))
        self.mentions.setdefault(new, [])
        result = replace(
            like,
            name=fresh(beside.results[0].name, ".tp", self.names),
            strides=contiguous(like.shape),
            offset=ZERO,
            storage=new,
        )
        self.values[result.name] = result
        self.read.add(like.storage)
        return Op(MARK, (value,), (result,), path=beside.path, source=beside.source, forward_of=beside.forward_of)

    # -- backward

    def _node_name(self, linear: Linear, position: int | None = None) -> str:
        """The name of the autograd node of a product, or of another operator of its module: its first result's."""
        place = linear.position if position is None else position
        op = self.flow.ops[place]
        return op.forward_of if self.flow.repeated[place] and op.forward_of is not None else op.results[0].name

    def _node_end(self, linear: Linear) -> int:
        """The last operator of a product's backward, after which what it saved is let go; -1 where it has none."""
        return max(self.flow.group.get(self._node_name(linear), ()), default=-1)

    def _node_end_of(self, position: int) -> int:
        return max(self.flow.group.get(self.flow.node[position] or "", ()), default=-1)

    def _is_gradient(self, value: str, reader: int) -> bool:
        made = self.flow.made.get(value)
        return made is not None and made < reader and (self.flow.gradient[made] or self.flow.gathers[made])

    def _gradient_of_input(self, linear: Linear) -> tuple[str, int] | None:
        """The value that is the gradient of a module's input, a partial sum, and the operator that makes it."""
        flow = self.flow
        group = flow.group.get(self._node_name(linear), ())
        products = (p for p in sorted(group) if base_name(flow.ops[p].opcode) == "mm")
        reads = (p for p in products if any(parameter_of(self.graph, o) == linear.weight for o in flow.ops[p].operands))
        position = next(reads, None)
        if position is None:
            return None
        views = {self._node_name(linear, p) for p in range(linear.entered, linear.position)}
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

    # -- ends

    def _python_end(self, storage: str, born: int) -> int:
        """Where the last Python reference to what a module was called with goes: where it was dropped, or freed in the forward;
        in a checkpoint's second run, where the first one let it go."""
        flow = self.flow
        end = flow.dropped.get(storage, flow.freed.get(storage, len(flow.ops)))
        if not flow.repeated[born]:
            return end
        if end < len(flow.ops) and flow.repeated[end]:
            return end
        maker = flow.born.get(storage)
        forward = flow.ops[maker].forward_of if maker is not None else None
        if maker is None or forward is None:
            return end
        twin = flow.ops[flow.made[forward]].results[[r.storage for r in flow.ops[maker].results].index(storage)].storage
        first = flow.dropped.get(twin, flow.freed.get(twin, -1))
        last = born
        for position in range(born, len(flow.ops)):
            if flow.repeated[position]:
                if flow.made[flow.ops[position].forward_of or ""] > first:
                    break
                last = position
            elif flow.gradient[position]:
                break
        return last

    def _undrop(self, storage: str) -> None:
        position = self.flow.dropped.get(storage)
        if position is not None:
            op = self.edit.op(position)
            self.edit.put(position, replace(op, drops=tuple(d for d in op.drops if d != storage)))

    def _free(self, storage: str, position: int, *, dropped: int) -> None:
        op = self.edit.op(position)
        self.edit.put(position, replace(op, frees=(*op.frees, storage)))
        if position > dropped and self.flow.phase[dropped].endswith("forward"):
            op = self.edit.op(dropped)
            self.edit.put(dropped, replace(op, drops=(*op.drops, storage)))
