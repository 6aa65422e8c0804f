"""The backward of an exchange: gradients go the ways of the tokens back."""

from __future__ import annotations

from dataclasses import replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Value
from memir.ir.layout import contiguous
from memir.parallel.exchange import MASK, TO_ALL, Exchange
from memir.parallel.frame import within


class ExchangeBackward(Exchange):
    """What is added to a call's backward."""

    __slots__ = ()

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
        sent = frame.run(TO_ALL, (spread,), (self.came, self.width))
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
        masked = frame.run(MASK, (source, mask), source.shape)
        frame.ops[-1] = replace(frame.ops[-1], frees=(source.storage, mask.storage))
        zeros = frame.run("aten.new_zeros", (masked,), source.shape)
        filled = replace(zeros, name=frame.fresh())
        frame.emit(
            replace(frame.bare(), opcode="aten._index_put_impl_", operands=(zeros.name, index, masked.name), results=(filled,))
        )
        token = flow.storage[index]
        self._free(frame, masked)
        frame.ops[-1] = replace(frame.ops[-1], frees=(*frame.ops[-1].frees, token))
        back = frame.run(TO_ALL, (filled,), (self.sent, self.width))
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
