"""A mark put into a flat program, and what its tensor takes over: storages, frees, drops and what is saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ZERO
from memir.parallel.edit import Edit
from memir.parallel.tensor.linears import Linear
from memir.parallel.tensor.names import fresh
from memir.parallel.tensor.walk import Graph
from memir.rewrite.flow import Flow

MARK = "tensor.redistribute"


@dataclass(slots=True)
class Marking:
    """Edits of a flat program that put marks in; positions are those of the program before."""

    graph: Graph
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

    def beside(self, group: Sequence[int], end: int) -> None:
        """The gradient that the first operator of a group reads is copied for the group; it dies where it did, or before it."""
        flow = self.flow
        first = group[0]
        value = next((o for o in flow.ops[first].operands if self.is_gradient(o, first)), None)
        if value is None:
            raise InconclusiveError("the backward of a split product reads no gradient", where=flow.ops[first].path)
        op = self.edit.op(first)
        value = op.operands[flow.ops[first].operands.index(value)]
        old = self.values[value].storage
        mark = self.copy(value, op)
        new = mark.results[0].storage
        inside = [p for p in group if p <= end]
        for position in inside:
            self.edit.rename(position, {**self._views(position, old, inside), value: mark.results[0].name})
            self.move(position, old, new, results=True)
        freed = next((p for p in inside if old in self.edit.op(p).frees), None)
        if freed is not None:
            here = self.edit.op(freed)
            self.edit.put(freed, replace(here, frees=tuple(f for f in here.frees if f != old)))
            mark = replace(mark, frees=(old,))
        self.edit.before(first, mark)
        last = self.edit.op(end)
        self.edit.put(end, replace(last, frees=(*last.frees, new)))

    def take_over(self, value: str, mark: Op, position: int, storage: str | None = None) -> None:
        """The mark's result stands in the value's place in every later operator, and its storage in the value's storage's."""
        old, copy = storage or self.flow.storage[value], mark.results[0]
        if old in self.read - {self.values[value].storage}:
            raise InconclusiveError("a split product's result is the next one's input", where=mark.path)
        for later in list(self.mentions[old]):
            if later <= position:
                continue
            self.edit.rename(later, {**self._views(later, old, range(position + 1, later)), value: copy.name})
            self.move(later, old, copy.storage, results=True, saves=True, ends=True)
            self.mentions[copy.storage].append(later)

    def _views(self, reader: int, storage: str, makers: Sequence[int]) -> dict[str, str]:
        """For the views of a storage that an operator reads: the same view as one of the makers in front of it made it again.

        A trace names equal views of a storage once, by the first: `logits.view(-1, V)` behind the head is the head's product.
        Behind a mark they are views of the copy."""
        flow, values = self.flow, self.graph.values
        found: dict[str, str] = {}
        for name in flow.ops[reader].operands:
            if flow.storage[name] != storage:
                continue
            own = replace(values[name], name="")
            for position in self.mentions[storage]:
                if position < reader and position in makers:
                    again = (r.name for r in flow.ops[position].results if replace(r, name="") == own)
                    found.update((name, other) for other in again)
        return found

    def move(
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

    def accumulate(self, copy: Value, after: int) -> None:
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
                self.move(later, total, copy.storage, results=True, saves=True, ends=True)
                self.mentions[copy.storage].append(later)
            self.edit.forget(total)
            return

    def copy(self, value: str, beside: Op) -> Op:
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

    def node_name(self, linear: Linear, position: int | None = None) -> str:
        """The name of the autograd node of a product, or of another operator of its module: its first result's."""
        place = linear.position if position is None else position
        op = self.flow.ops[place]
        return op.forward_of if self.flow.repeated[place] and op.forward_of is not None else op.results[0].name

    def node_end(self, linear: Linear) -> int:
        """The last operator of a product's backward, after which what it saved is let go; -1 where it has none."""
        return max(self.flow.group.get(self.node_name(linear), ()), default=-1)

    def node_end_of(self, position: int) -> int:
        """The last operator of a forward operator's backward; -1 where it has none."""
        return max(self.flow.group.get(self.flow.node[position] or "", ()), default=-1)

    def is_gradient(self, value: str, reader: int) -> bool:
        """Whether a value is a gradient that an operator reads."""
        made = self.flow.made.get(value)
        return made is not None and made < reader and (self.flow.gradient[made] or self.flow.gathers[made])

    def python_end(self, storage: str, born: int) -> int:
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

    def undrop(self, storage: str) -> None:
        """The storage is not dropped where it was."""
        position = self.flow.dropped.get(storage)
        if position is not None:
            op = self.edit.op(position)
            self.edit.put(position, replace(op, drops=tuple(d for d in op.drops if d != storage)))

    def free(self, storage: str, position: int, *, dropped: int) -> None:
        """The storage dies after that operator; where Python lets go of it before, that is told."""
        op = self.edit.op(position)
        self.edit.put(position, replace(op, frees=(*op.frees, storage)))
        if position > dropped and self.flow.phase[dropped].endswith("forward"):
            op = self.edit.op(dropped)
            self.edit.put(dropped, replace(op, drops=(*op.drops, storage)))
