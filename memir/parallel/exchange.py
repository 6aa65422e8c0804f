"""One call of the experts under expert parallelism: its tensors on a rank, and small edits of its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import reach
from memir.ir.opset import scratch_of
from memir.ir.size import ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.experts import Forward
from memir.parallel.frame import Frame, Shape, within

TO_ALL = "_c10d_functional.all_to_all_single"
MASK = "aten.masked_fill.Scalar"


@dataclass(slots=True)
class Exchange:
    """A call, what it sends and receives, and what its backward will read."""

    edit: Edit
    values: dict[str, Value]
    call: Forward
    first: Forward  # the call that it runs again, or itself
    degree: int
    load: int
    saved: dict[str, Value] = field(default_factory=dict)  # what backward reads: order, token, mask, outputs, weights
    hidden: Value = field(init=False)
    flat: Value = field(init=False)  # the routing weights, one a row
    sent: Size = field(init=False)  # rows: each token once for each of its experts
    came: Size = field(init=False)
    width: Size = field(init=False)
    experts: Size = field(init=False)
    picks: Size = field(init=False)  # experts of a token
    wide: str = field(init=False)  # the type of weighted results

    def __post_init__(self) -> None:
        flow, call = self.edit.flow, self.call
        self.hidden = self.values[flow.ops[call.gather].operands[0]]
        self.flat = self.values[flow.ops[call.weigh].operands[0]]
        self.sent = self.values[flow.ops[call.sort].operands[0]].shape[0]
        self.came = self.sent * self.load
        self.width = self.hidden.shape[1]
        self.experts = self.values[flow.ops[call.up].operands[1]].shape[0]
        self.picks = self.values[flow.ops[flow.made[self.flat.name]].operands[0]].shape[1]
        self.wide = flow.ops[call.weighted].results[0].dtype

    def _group(self, position: int) -> list[int]:
        flow = self.edit.flow
        return flow.group.get(flow.node[position] or "", [])

    def _maker(self, operands: Sequence[str]) -> int:
        """The operator that allocates the gradient that a product's backward reads."""
        return self.edit.flow.born[self.edit.flow.storage[operands[0]]]

    def _frame(self, like: Op, end: str) -> Frame:
        return Frame(within(like.results[0].name, end), like)

    def _saving(self, frame: Frame, value: Value, index: Value) -> Value:
        """The operator that made `value` keeps its index; without autograd that dies."""
        op = frame.ops[-1]
        frame.ops[-1] = (
            replace(op, saves=(index.storage,)) if self.call.saves else replace(op, frees=(*op.frees, index.storage))
        )
        return value

    def _free(self, frame: Frame, *values: Value) -> None:
        op = frame.ops[-1]
        frame.ops[-1] = replace(op, frees=(*op.frees, *dict.fromkeys(v.storage for v in values)))

    def _declare(self, frame: Frame) -> None:
        kept = {v.storage for v in self.saved.values()} if self.call.saves else set()
        for storage in frame.storages:
            self.edit.declare(replace(storage, kind=Kind.ACTIVATION) if storage.name in kept else storage)
        frame.storages = []

    def _before(self, position: int, frame: Frame) -> None:
        self._declare(frame)
        self.edit.before(position, *frame.ops)

    def _drop(self, position: int, but: tuple[int, ...] = ()) -> None:
        """The operator is not run, and what it made is not there; what else died with it is the caller's business."""
        flow, edit = self.edit.flow, self.edit
        own = {r.storage for r in flow.ops[position].results if flow.born.get(r.storage) == position}
        for name in own:
            edit.take_free(name)
            edit.forget(name)
        edit.put(position, None)

    def _unsaved(self, position: int, storage: str) -> None:
        """Autograd has no need of the storage: it dies where Python lets go of it."""
        edit, flow = self.edit, self.edit.flow
        op = edit.op(position)
        edit.put(position, replace(op, saves=tuple(s for s in op.saves if s != storage)))
        if self.call.total is None:
            return  # recomputation ends otherwise
        at = flow.dropped.get(storage, self.call.narrow or self.call.total)  # they are the call's own variables
        edit.free_after(storage, at)
        op = edit.op(at)
        edit.put(at, replace(op, drops=tuple(d for d in op.drops if d != storage)))

    def _typed(self, position: int, dtype: str) -> None:
        """The operator's floating-point results have this type."""
        op = self.edit.op(position)
        made = {r.name: replace(r, dtype=dtype) for r in op.results if r.dtype != dtype and r.dtype[0] in "bf"}
        self.edit.retype(position, made)
        if made:
            self.edit.put(position, replace(self.edit.op(position), scratch=ZERO))  # one of a cast between types
        for value in made.values():
            if self.edit.flow.born.get(value.storage) == position:
                self._resize(value)

    def _localized(self, position: int) -> None:
        """The operator on the rank's rows and experts."""
        edit, flow = self.edit, self.edit.flow
        op = edit.op(position)
        made = {}
        for result in flow.ops[position].results:
            local = replace(result, shape=self._local(result.shape))
            if local != result:
                made[result.name] = local
        edit.retype(position, made)
        for value in made.values():
            if flow.born.get(value.storage) == position:
                self._resize(value)
        if op.scratch is not ZERO and flow.ops[position].opcode == "aten.sort":
            edit.put(position, replace(edit.op(position), scratch=op.scratch * self.load))

    def _local(self, shape: Shape) -> Shape:
        own = self.experts.exact_div(self.degree)
        if len(shape) in (1, 3) and shape[0] == self.experts:
            shape = (own, *shape[1:])
        return tuple(self.came if extent == self.sent else extent for extent in shape)

    def _resize(self, value: Value) -> None:
        self.edit.resize(value.storage, reach(value.shape, value.strides, value.offset) * ITEMSIZE[value.dtype])

    def _masked(self, position: int, mask: Value) -> None:
        """The operator's result goes into a masked copy, which takes over its names, and dies."""
        edit = self.edit
        op = edit.op(position)
        made = op.results[0]
        frame = self._frame(op, ".raw")
        name = frame.fresh()
        raw = replace(made, name=name, storage=name)
        edit.declare(Storage(name, edit.storage(made.storage).nbytes, Kind.TEMPORARY))
        saves = (mask.storage,) if self.call.saves and edit.flow.is_forward(position) else ()
        edit.put(position, replace(op, results=(raw,), frees=tuple(f for f in op.frees if f != made.storage)))
        copied = replace(
            frame.bare(), opcode=MASK, operands=(raw.name, mask.name), results=(made,), saves=saves, frees=(raw.storage,)
        )
        edit.behind[position] = [copied, *edit.behind.get(position, [])]

    def _product(self, frame: Frame, first: Value, second: Value, dtype: str) -> Value:
        """A product in the wider type, with the workspace that it takes where the step's own took one."""
        made = frame.run("aten.mul.Tensor", (first, second), first.shape, dtype=dtype)
        if self.edit.flow.ops[self.call.weighted].scratch is not ZERO:
            scratch = scratch_of("cpu", "aten.mul.Tensor", (first, second), (made,))
            frame.ops[-1] = replace(frame.ops[-1], scratch=scratch)
        return made
