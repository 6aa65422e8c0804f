"""Experts divided over ranks: each rank's tokens go to the experts' ranks and come back, as transformers' AllToAllEP does it.

transformers/distributed/expert_parallel.py (5.24), `AllToAllEP._dispatch_tokens` and `_combine_tokens` around
`grouped_mm_experts_forward`, which runs with one expert a row and masks rows that are no expert's. The rank's experts, and what
they compute, stay the operators that they are in the step; what is added is written down with the moment at which it dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, reach
from memir.ir.opset import scratch_of
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.experts import Forward, calls_of
from memir.parallel.frame import Frame, Shape, within
from memir.parallel.shards import Shard, shard_states
from memir.rewrite.flow import Flow

_TO_ALL = "_c10d_functional.all_to_all_single"
_MASK = "aten.masked_fill.Scalar"


def divided_experts(program: Program, degree: int, load: int) -> tuple[Program, list[int]]:
    """The flat program with 1/degree of each layer's experts; the origin of each operator.

    `load`: rows that the rank receives over those that it sends; 1 is balanced. UsageError, InconclusiveError: as `calls_of`,
    and experts that do not divide.
    """
    flow = Flow(program)
    calls = calls_of(flow)
    edit = Edit(flow)
    values = {v.name: v for v in program.values} | {r.name: r for op in flow.ops for r in op.results}
    experts = {flow.storage[flow.ops[p].operands[1]] for call in calls for p in (call.up, call.down)}
    whole = [v for v in program.values if v.storage in experts]
    for value in whole:
        count = value.shape[0]
        if not count.is_constant or count.constant % degree:
            raise UsageError(f"expert-parallel: {count} experts do not divide by {degree}", where=value.name)
    shards = [Shard(v.storage, (v.shape[0].exact_div(degree), *v.shape[1:]), v.dtype) for v in whole]
    shard_states(edit, shards)
    for call in calls:
        forward = flow.made.get(flow.ops[call.up].forward_of or "", call.up)
        _Call(edit, values, call, next(c for c in calls if c.up == forward), degree, load).run()
    return edit.applied()


@dataclass(slots=True)
class _Call:
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

    def run(self) -> None:
        self._forward()
        if self.call.saves:
            self._backward()

    # -- forward -------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        edit, call, flow = self.edit, self.call, self.edit.flow
        recv, ids, ones = self._dispatch()
        for position in range(call.first, (call.total or call.inverse) + 1):
            if flow.ops[position].path.startswith(flow.ops[call.up].path) and position >= call.sort:
                self._localized(position)
        edit.rename(call.sort, {flow.ops[call.sort].operands[0]: ids.name})
        edit.rename(call.gather, {self.hidden.name: recv.name})
        edit.rename(call.weigh, {self.flat.name: ones.name})
        ones_storage = flow.ops[call.weigh].results[0].storage
        for position in (call.weigh, *(flow.made[o] for o in flow.ops[call.weighted].operands)):
            if ones_storage in {r.storage for r in flow.ops[position].results}:
                self._typed(position, self.hidden.dtype)
        self._typed(call.weighted, self.hidden.dtype)
        if call.back is not None:
            self._typed(call.back, self.hidden.dtype)
        mask = self._masks()
        self._masked(call.up, mask)
        self._masked(call.down, mask)
        if call.saves:
            self._unsaved(call.weigh, flow.storage[flow.ops[call.weigh].operands[1]])
            self._unsaved(call.weighted, flow.storage[flow.ops[call.down].results[0].name])
        self._combine(recv, ids, ones)

    def _dispatch(self) -> tuple[Value, Value, Value]:
        """Rows received, their local experts, and weights of one."""
        op = self.edit.flow.ops[self.call.sort]
        frame = self._frame(op, ".dispatch")
        picked = self.values[op.operands[0]]
        count, own = self.experts, self.experts.exact_div(self.degree)
        order = self._sorted(frame, picked, op)
        token = frame.run("aten.floor_divide", (order,), (self.sent,))
        send = self._saving(frame, frame.run("aten.index.Tensor", (self.hidden, token), (self.sent, self.width)), token)
        counts = frame.run("aten.zeros", (), (count,), dtype="i64")
        each = frame.run("aten.ones_like", (picked,), (self.sent,))
        self._free(frame, each)
        counted = frame.run("aten.empty_like", (counts,), (Size.of(self.degree), own))
        sums = [frame.run("aten.sum.dim_IntList", (c,), (Size.of(self.degree),)) for c in (counts, counted)]
        both = frame.run("aten.stack", tuple(sums), (Size.of(2), Size.of(self.degree)))
        self._free(frame, *sums, both)
        recv = frame.run(_TO_ALL, (send,), (self.came, self.width))
        numbers = frame.run("aten.arange", (), (own,), dtype="i64")
        repeated = frame.run("aten.repeat", (numbers,), (count,))
        self._free(frame, numbers)
        index = frame.run("aten.repeat_interleave.Tensor", (counted,), (self.came,))
        ids = frame.run("aten.index_select", (repeated, index), (self.came,))
        self._free(frame, index, repeated)
        ones = frame.run("aten.ones_like", (ids,), (self.came,), dtype=self.hidden.dtype)
        self._free(frame, send, counts, counted)
        if self.call.saves:
            self.saved |= {"order": order, "token": token}
        else:
            self.saved["order"] = order
        self._before(self.call.sort, frame)
        return recv, ids, ones

    def _sorted(self, frame: Frame, picked: Value, like: Op) -> Value:
        """`torch.argsort`: the sorted values die at once."""
        made = []
        for _ in range(2):
            name = frame.fresh()
            frame.storages.append(Storage(name, self.sent * ITEMSIZE["i64"], Kind.TEMPORARY))
            made.append(Value(name, "i64", (self.sent,), (ONE,), ZERO, name))
        frame.emit(
            replace(
                frame.bare(),
                opcode=like.opcode,
                operands=(picked.name,),
                results=tuple(made),
                scratch=like.scratch,
                frees=(made[0].storage,),
            )
        )
        return made[1]

    def _masks(self) -> Value:
        """Rows of no expert: none here, but masked all the same (`_is_expert_parallel`)."""
        call, flow = self.call, self.edit.flow
        ranks = flow.ops[call.sort].results[0]
        gathered = flow.ops[call.gather].results[0]
        frame = self._frame(flow.ops[call.ends], ".mask")
        ranks, gathered = replace(ranks, shape=(self.came,)), replace(gathered, shape=(self.came, self.width))
        mask = frame.run("aten.ge.Scalar", (ranks,), (self.came, ONE), dtype="bool")
        clamped = replace(ranks, name=frame.fresh())
        frame.emit(replace(frame.bare(), opcode="aten.clamp_", operands=(ranks.name,), results=(clamped,)))
        filled = replace(gathered, name=frame.fresh())
        saves = (mask.storage,) if call.saves else ()
        frame.emit(
            replace(
                frame.bare(),
                opcode="aten.masked_fill_.Scalar",
                operands=(gathered.name, mask.name),
                results=(filled,),
                saves=saves,
            )
        )
        self.saved["mask"] = mask
        self._declare(frame)
        self.edit.after(call.ends, *frame.ops)
        return mask

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
            frame.bare(), opcode=_MASK, operands=(raw.name, mask.name), results=(made,), saves=saves, frees=(raw.storage,)
        )
        edit.behind[position] = [copied, *edit.behind.get(position, [])]

    def _combine(self, recv: Value, ids: Value, ones: Value) -> None:
        """Results back to the ranks that sent the tokens, weighted and summed."""
        edit, call = self.edit, self.call
        at = call.inverse if call.total is None else call.total
        op = edit.op(at)
        frame = self._frame(op, ".combine")
        own = self._summed(frame)
        back = frame.run(_TO_ALL, (own,), (self.sent, self.width))
        outputs = frame.run("aten.empty_like", (back,), back.shape)
        put = replace(outputs, name=frame.fresh())
        order = self.saved["order"]
        frame.emit(
            replace(frame.bare(), opcode="aten.index_put_", operands=(outputs.name, order.name, back.name), results=(put,))
        )
        frame.ops[-1] = replace(frame.ops[-1], saves=(order.storage,) if call.saves else ())
        shape = (self.hidden.shape[0], self.picks, self.width)
        rows = frame.view(put, shape)
        weights = frame.view(self.flat, (*shape[:2], ONE))
        gone = [back, own, ids, ones, recv]
        if call.total is not None:
            weighed = self._product(frame, rows, weights, self.wide)
            if call.saves:
                frame.ops[-1] = replace(frame.ops[-1], saves=(outputs.storage, self.flat.storage))
            frame.emit(replace(frame.bare(), opcode="aten.sum.dim_IntList", operands=(weighed.name,), results=op.results))
            gone = [weighed, *gone]
        if call.saves:
            self.saved |= {"outputs": outputs, "rows": rows, "weights": weights}
        else:
            gone += [outputs, order]
        self._free(frame, *gone)
        if call.total is None:  # recomputation stops before the product that keeps the last of them
            rest = edit.op(at).frees
            edit.put(at, replace(edit.op(at), frees=()))
            frame.ops[-1] = replace(frame.ops[-1], frees=(*frame.ops[-1].frees, *rest))
        self._declare(frame)
        edit.after(at, *frame.ops)

    def _summed(self, frame: Frame) -> Value:
        """The sum over a row's one expert, with which the experts' call ends."""
        edit, call, flow = self.edit, self.call, self.edit.flow
        if call.total is None:
            return self._summed_again(frame)
        op = edit.op(call.total)
        name = frame.fresh()
        own = Value(name, self.hidden.dtype, (self.came, self.width), (self.width, ONE), ZERO, name)
        edit.declare(Storage(name, self.came * self.width * ITEMSIZE[own.dtype], Kind.TEMPORARY))
        view = flow.made[op.operands[0]]
        seen = self.values[op.operands[0]]
        if flow.ops[view].opcode != "aten.view":
            raise InconclusiveError("expert-parallel: the experts' results are not summed by token", where=f"@{op.path}")
        one = replace(seen, dtype=self.hidden.dtype, shape=(self.came, ONE, self.width), strides=(self.width, self.width, ONE))
        edit.retype(view, {seen.name: one})
        masked = () if call.saves else (self.saved["mask"].storage,)
        edit.put(call.total, replace(op, results=(own,), saves=(), frees=(*op.frees, *masked)))
        self._end_of_call(op.results[0].storage)
        return own

    def _summed_again(self, frame: Frame) -> Value:
        """Recomputation goes on to what the exchange saves: through the rest of the experts' call."""
        edit, call, flow = self.edit, self.call, self.edit.flow
        weighted, inverse = edit.op(call.weighted).results[0], flow.ops[call.inverse].results[0]
        shape = (self.came, self.width)
        ordered = frame.run("aten.index.Tensor", (weighted, inverse), shape)
        frame.ops[-1] = replace(frame.ops[-1], saves=(inverse.storage,), frees=(weighted.storage,))
        own = frame.run("aten.sum.dim_IntList", (ordered,), shape)
        within = (call.sort, flow.made[flow.ops[call.count].operands[0]], call.count)
        gone = [r.storage for p in within for r in flow.ops[p].results] + [edit.flow.ops[call.down].results[0].storage]
        for name in (weighted.storage, *gone):
            edit.take_free(name)
        frame.ops[-1] = replace(frame.ops[-1], frees=(ordered.storage, *gone))
        return own

    def _product(self, frame: Frame, first: Value, second: Value, dtype: str) -> Value:
        """A product in the wider type, with the workspace that it takes where the step's own took one."""
        made = frame.run("aten.mul.Tensor", (first, second), first.shape, dtype=dtype)
        if self.edit.flow.ops[self.call.weighted].scratch is not ZERO:
            scratch = scratch_of("cpu", "aten.mul.Tensor", (first, second), (made,))
            frame.ops[-1] = replace(frame.ops[-1], scratch=scratch)
        return made

    def _end_of_call(self, kept: str) -> None:
        """A cast that was the experts' last operator is the exchange's: what died with the call dies before it."""
        edit, call = self.edit, self.call
        if call.narrow is None or call.total is None:
            return
        cast, total = edit.op(call.narrow), edit.op(call.total)
        gone = tuple(f for f in cast.frees if f != kept)
        edit.put(call.total, replace(total, frees=(*total.frees, *gone), drops=(*total.drops, *cast.drops)))
        edit.put(call.narrow, replace(cast, frees=tuple(f for f in cast.frees if f == kept), drops=()))

    # -- backward ------------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        call, flow, first = self.call, self.edit.flow, self.first
        if first.back is None or first.total is None:
            raise InconclusiveError(
                "expert-parallel: experts run again without a first time", where=f"@{flow.ops[call.up].path}"
            )
        at = {"gather": call.gather, "weigh": call.weigh, "up": call.up, "down": call.down, "weighted": call.weighted}
        groups = {name: self._group(position) for name, position in (at | {"back": first.back, "total": first.total}).items()}
        seen = self._group(flow.made[flow.ops[first.total].operands[0]])
        if not (groups["weighted"] and groups["back"] and groups["gather"] and groups["weigh"]):
            where = f"@{flow.ops[call.up].path}"
            raise InconclusiveError("expert-parallel: tokens or routing weights need no gradient", where=where)
        for position in (p for group in groups.values() for p in group):
            self._localized(position)
        for position in range(groups["down"][0] if groups["down"] else 0, groups["gather"][0]):
            if flow.ops[position].path.startswith(flow.ops[call.up].path):
                self._localized(position)
        sent = self._combine_backward(groups, seen)
        mask = self.saved["mask"]
        self._back(groups["back"], sent)
        self._weighted(groups["weighted"])
        self._masked(self._maker(flow.ops[groups["down"][0]].operands), mask)
        self._masked(self._maker(flow.ops[groups["up"][0]].operands), mask)
        self._dispatch_backward(groups["gather"], mask)

    def _combine_backward(self, groups: dict[str, list[int]], seen: list[int]) -> Value:
        """The gradient of what came back, sent to the experts' ranks; that of the routing weights."""
        edit, call, flow = self.edit, self.call, self.edit.flow
        place = groups["back"][0]
        expanded = self.values[flow.ops[groups["total"][-1]].results[0].name]
        outputs, rows, weights, order = (self.saved[n] for n in ("outputs", "rows", "weights", "order"))
        frame = self._frame(flow.ops[groups["back"][0]], ".combine")
        for_weights = self._product(frame, replace(expanded, shape=rows.shape), rows, self.wide)
        for_rows = self._product(frame, replace(expanded, shape=rows.shape), weights, self.wide)
        saved = (outputs.storage, *self._weights_end(place))
        if flow.repeated[call.up]:  # what a checkpoint gives back is held by the node's formula only
            frame.ops[-1] = replace(frame.ops[-1], frees=saved)
            saved = ()
        if for_rows.dtype != self.hidden.dtype:
            wide = for_rows
            for_rows = frame.run("aten._to_copy", (wide,), rows.shape, dtype=self.hidden.dtype)
            self._free(frame, wide)
        zeros, put = groups["weigh"][0], groups["weigh"][-1]
        end = flow.ops[put].results[0]
        grown = frame.run("aten.sum.dim_IntList", (for_weights,), weights.shape, dtype=weights.dtype)
        gradient = replace(grown, storage=end.storage)
        frame.storages = [s for s in frame.storages if s.name != grown.storage]
        dead = (for_weights.storage, *saved, *self._also_freed(seen))
        frame.ops[-1] = replace(frame.ops[-1], results=(gradient,), frees=dead)
        spread = frame.run("aten.index.Tensor", (for_rows, order), (self.sent, self.width))
        self._free(frame, for_rows, order)
        sent = frame.run(_TO_ALL, (spread,), (self.came, self.width))
        self._free(frame, spread)
        self._declare(frame)
        edit.before(place, *frame.ops)
        flat = replace(end, name=within(end.name, ".flat"), shape=self.flat.shape, strides=contiguous(self.flat.shape))
        edit.before(place, replace(frame.bare(), opcode="aten.view", operands=(gradient.name,), results=(flat,)))
        for position in range(put + 1, len(flow.ops)):
            if end.name in flow.ops[position].operands:
                edit.rename(position, {end.name: flat.name})
        for position in (zeros, put):
            edit.put(position, None)
        for position in seen:
            self._drop(position)
        return sent

    def _also_freed(self, group: list[int]) -> tuple[str, ...]:
        """What dies with operators that go, and is not theirs."""
        flow = self.edit.flow
        own = {r.storage for p in group for r in flow.ops[p].results if flow.born.get(r.storage) == p}
        return tuple(f for p in group for f in self.edit.op(p).frees if f not in own)

    def _weights_end(self, begin: int) -> tuple[str, ...]:
        """The routing weights are saved now: they die with the node that read them, if not later."""
        edit, flow, name = self.edit, self.edit.flow, self.flat.storage
        at = flow.freed.get(name)
        if at is None or at >= begin:
            return ()
        ops = (edit.op(at), *edit.behind.get(at, ()))
        now = [replace(op, frees=tuple(f for f in op.frees if f != name)) for op in ops]
        if flow.phase[at].endswith("forward"):
            now[0] = replace(now[0], drops=(*now[0].drops, name))
        edit.put(at, now[0])
        if len(now) > 1:
            edit.behind[at] = now[1:]
        edit.storages[name] = replace(edit.storage(name), kind=Kind.ACTIVATION)
        return (name,)

    def _back(self, group: list[int], sent: Value) -> None:
        """Rows in the order of experts: zeros that the gradient is put into."""
        edit, flow = self.edit, self.edit.flow
        for position in group:
            self._typed(position, self.hidden.dtype)
        last = edit.op(group[-1])
        edit.put(group[0], replace(edit.op(group[0]), operands=(sent.name,)))
        zeros = last.operands[0]
        before = flow.storage[flow.ops[group[-1]].operands[-1]]
        edit.put(
            group[-1],
            replace(
                last,
                operands=(zeros, *last.operands[1:-1], sent.name),
                frees=(*(f for f in last.frees if f != before), sent.storage),
            ),
        )

    def _weighted(self, group: list[int]) -> None:
        """Weights of one need no gradient."""
        edit, flow, call = self.edit, self.edit.flow, self.call
        weights = flow.storage[flow.ops[call.weigh].results[0].name]
        zeros = flow.storage[flow.ops[group[0]].operands[0]]
        products = [p for p in group if flow.ops[p].opcode.startswith("aten.mul")]
        (kept,) = [p for p in products if weights in flow.reads(p)]
        result = flow.ops[kept].results[0]
        casts = [p for p in group if flow.ops[p].opcode == "aten._to_copy" and result.name in flow.ops[p].operands]
        for position in group:
            if position != kept and position not in casts:
                self._drop(position)
        if casts:
            self._drop(kept, but=(casts[0],))
            cast = flow.ops[casts[0]].results[0]
            edit.put(kept, None)
            made = edit.op(casts[0]).results[0]
            edit.put(casts[0], replace(flow.ops[kept], results=(made,), frees=(), drops=(), saves=()))
            assert cast.name == made.name
            kept = casts[0]
        for operand in flow.ops[call.weighted].operands:
            if flow.storage[operand] == weights and flow.made[operand] != call.weigh:  # seen as a column
                for position in self._group(flow.made[operand]):
                    self._drop(position)
        for name in (zeros, weights):
            edit.take_free(name)
        op = edit.op(kept)
        edit.put(kept, replace(op, frees=(*(f for f in op.frees if f not in (zeros, weights)), zeros, weights)))

    def _dispatch_backward(self, group: list[int], mask: Value) -> None:
        """The tokens' gradient back to the ranks that sent them."""
        edit, flow = self.edit, self.edit.flow
        put = group[-1]
        op = edit.op(put)
        source, index = self.values[op.operands[-1]], op.operands[1]
        source = replace(source, shape=(self.came, self.width))
        frame = self._frame(op, ".dispatch")
        masked = frame.run(_MASK, (source, mask), source.shape)
        frame.ops[-1] = replace(frame.ops[-1], frees=(source.storage, mask.storage))
        zeros = frame.run("aten.new_zeros", (masked,), source.shape)
        filled = replace(zeros, name=frame.fresh())
        frame.emit(
            replace(frame.bare(), opcode="aten._index_put_impl_", operands=(zeros.name, index, masked.name), results=(filled,))
        )
        token = flow.storage[index]
        self._free(frame, masked)
        frame.ops[-1] = replace(frame.ops[-1], frees=(*frame.ops[-1].frees, token))
        back = frame.run(_TO_ALL, (filled,), (self.sent, self.width))
        self._free(frame, zeros)
        self._declare(frame)
        edit.before(group[0], *frame.ops)
        for name in (source.storage, token):
            edit.take_free(name)
        edit.put(group[0], replace(edit.op(group[0]), operands=(back.name,)))
        op = edit.op(put)
        sent = self.saved["token"]
        frees = (*(f for f in op.frees if f not in (source.storage, token)), back.storage, sent.storage)
        edit.put(put, replace(op, operands=(op.operands[0], sent.name, back.name), frees=frees))

    # -- small things --------------------------------------------------------------------------------------------

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
