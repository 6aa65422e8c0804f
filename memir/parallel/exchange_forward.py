"""The forward of an exchange: tokens go to their experts' ranks, results come back and are weighted."""

from __future__ import annotations

from dataclasses import replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.exchange import TO_ALL, Exchange
from memir.parallel.frame import Frame


class ExchangeForward(Exchange):
    """What is added to a call's forward (`AllToAllEP._dispatch_tokens`, `_combine_tokens`)."""

    __slots__ = ()

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
        recv = frame.run(TO_ALL, (send,), (self.came, self.width))
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

    def _combine(self, recv: Value, ids: Value, ones: Value) -> None:
        """Results back to the ranks that sent the tokens, weighted and summed."""
        edit, call = self.edit, self.call
        at = call.inverse if call.total is None else call.total
        op = edit.op(at)
        frame = self._frame(op, ".combine")
        own = self._summed(frame)
        back = frame.run(TO_ALL, (own,), (self.sent, self.width))
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

    def _end_of_call(self, kept: str) -> None:
        """A cast that was the experts' last operator is the exchange's: what died with the call dies before it."""
        edit, call = self.edit, self.call
        if call.narrow is None or call.total is None:
            return
        cast, total = edit.op(call.narrow), edit.op(call.total)
        gone = tuple(f for f in cast.frees if f != kept)
        edit.put(call.total, replace(total, frees=(*total.frees, *gone), drops=(*total.drops, *cast.drops)))
        edit.put(call.narrow, replace(cast, frees=tuple(f for f in cast.frees if f == kept), drops=()))
