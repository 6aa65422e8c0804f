"""Attention with its heads divided over ranks instead of its sequence: DeepSpeed-Ulysses (arXiv 2309.14509, section 3).

deepspeed/sequence/layer.py (0.19): `DistributedAttention` around `scaled_dot_product_attention`, queries, keys and values as
[B, S, H, K]. Each goes through `_SeqAllToAll`: a copy ordered by rank, an all-to-all, and a copy that puts the pieces in a row
(`single_all_to_all`), so that the kernel has the whole sequence of its H/N heads; its output goes back the same way. Autograd
keeps what the kernel was given, not what was exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memir.errors import UsageError
from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.opset import scratch_of, scratch_target
from memir.ir.size import ONE, ZERO, Size, floor_div
from memir.parallel.edit import Edit
from memir.parallel.frame import Frame, within
from memir.parallel.relayout import relaid
from memir.parallel.stages import rename
from memir.rewrite.changes import Changes
from memir.rewrite.ends import ends_of
from memir.rewrite.flow import Flow

HEADS = 1  # the dimension of [B, H, S, K]
_GIVEN = 3  # operands of a forward: query, key, value


def with_divided_heads(program: Program, degree: int, kernels: tuple[str, ...]) -> tuple[Program, list[int]]:
    """The flat program with its attention on H/degree heads, S being the rank's part; the origin of each operator.

    `kernels` are the forward opcodes. UsageError: no such operator, a mask, heads that do not divide.
    """
    return _Ulysses(Flow(program), degree, kernels).run()


@dataclass(slots=True)
class _Ulysses:
    flow: Flow
    degree: int
    kernels: tuple[str, ...]
    edit: Edit = field(init=False)
    values: dict[str, Value] = field(init=False)
    given: dict[int, tuple[Value, ...]] = field(default_factory=dict)  # a forward -> what its kernel reads and its output

    def __post_init__(self) -> None:
        self.edit = Edit(self.flow)
        self.values = {v.name: v for v in self.flow.program.values} | {r.name: r for op in self.flow.ops for r in op.results}

    def run(self) -> tuple[Program, list[int]]:
        found = [p for p, op in enumerate(self.flow.ops) if op.opcode.removesuffix("_backward") in self.kernels]
        if not found:
            raise UsageError("context-parallel: the step calls no attention kernel", hint="--attention sdpa")
        self._let_go(found)
        for position in found:
            if self.flow.ops[position].opcode in self.kernels:
                self._forward(position)
            else:
                self._backward(position)
        return self.edit.applied()

    def _let_go(self, found: list[int]) -> None:
        """What was exchanged is not the kernel's to keep: it dies where nothing else holds it."""
        flow = self.flow
        mine: set[str] = set()
        ops = list(flow.ops)
        for position in found:
            op = flow.ops[position]
            if op.opcode in self.kernels:
                self._check(op)
                mine |= {flow.storage[o] for o in op.operands} | {op.results[0].storage}
            else:  # its own gradient and logsumexp, seeds
                ops[position] = replace(op, operands=(op.operands[0], *op.operands[5:]))
        stripped = Flow(_with_ops(flow, ops))
        saves = {p: op.saves for p, op in enumerate(flow.ops) if op.saves}
        for position in found:
            op = flow.ops[position]
            if op.opcode in self.kernels:
                saves[position] = tuple(s for s in op.saves if s not in mine)
        ends = ends_of(Changes(stripped, frozenset(), saves=saves))
        for name in sorted(mine):
            end = ends.get(name)
            if end is None or end == flow.freed.get(name):
                continue
            if (dropped := flow.dropped.get(name)) == end:
                op = self.edit.op(end)
                self.edit.put(end, replace(op, drops=tuple(d for d in op.drops if d != name)))
            elif dropped is not None and dropped > end:
                raise AssertionError(f"{name} dies at {end}, before Python lets go of it")
            self.edit.free_after(name, end)

    def _check(self, op: Op) -> None:
        where = " ".join(filter(None, (op.opcode, f"@{op.path}", op.source)))
        if len(op.operands) > _GIVEN:
            raise UsageError("context-parallel: DeepSpeed's attention passes on no mask that is a rank's part", where=where)
        for name in op.operands:
            heads = self.values[name].shape[HEADS]
            if heads.is_constant and heads.constant % self.degree:
                raise UsageError(f"context-parallel: {heads} heads do not divide by {self.degree}", where=where)

    def _forward(self, position: int) -> None:
        op = self.flow.ops[position]
        frame = Frame(within(op.results[0].name, ".ulysses"), op)
        read = []
        for word, name in zip(("query", "key", "value"), op.operands, strict=True):
            read.append(_heads_divided(frame, self.values[name], self.degree))
            frame.let(**{f"{word}_layer": read[-1]}, res=None)
        made, rest = self._kernel(frame, op, tuple(read), {1: op.results[1].name})
        frame.let(context_layer=made[0])
        output = _sequence_divided(frame, made[0], self.degree)
        self.given[position] = (*read, made[0])
        kept = (*read, made[0]) if op.saves else ()
        frame.end(output, made[1], *kept)
        self._resized(op.results[1], made[1])
        saves = tuple(dict.fromkeys(v.storage for v in (*read, *made))) if op.saves else ()
        place = next(k for k, one in enumerate(frame.ops) if one.opcode == op.opcode)
        beside = {r.storage for r in op.results[1:]}
        gone = tuple(f for f in self.edit.op(position).frees if f in beside)  # with what nobody saves
        kernel = frame.ops[place]
        frame.ops[place] = replace(kernel, results=(*made, *rest), saves=saves, frees=(*kernel.frees, *gone))
        self._put(position, frame, {output.name: op.results[0]})

    def _backward(self, position: int) -> None:
        op = self.flow.ops[position]
        forward = self.flow.born[self.flow.storage[op.operands[4]]]
        query, key, value, out = self.given[forward]
        frame = Frame(within(op.results[0].name, ".ulysses"), op)
        gradient = _heads_divided(frame, self.values[op.operands[0]], self.degree)
        frame.let(gradient=gradient, res=None)
        own = self.values[op.operands[0]].storage
        gone = (own,) if own in self.edit.op(position).frees else ()  # its node is that of the output's exchange
        frame.ops[-1] = replace(frame.ops[-1], frees=(*frame.ops[-1].frees, *gone))
        before = (gradient, query, key, value, out, *(self.values[o] for o in op.operands[5:]))
        made, rest = self._kernel(frame, op, before, {})
        place = len(frame.ops) - 1
        frame.let(grad_query=made[0], grad_key=made[1], grad_value=made[2], gradient=None)
        frame.ops[place] = replace(
            frame.ops[place], results=(*made, *rest), frees=self._released(position, frame.ops[place], forward, gone)
        )
        new: dict[str, Value] = {}
        for number, word in ((2, "grad_value"), (1, "grad_key"), (0, "grad_query")):  # the order of sequence numbers
            back = _sequence_divided(frame, made[number], self.degree)
            frame.let(**{f"new_{word}": back, word: None}, res=None)
            new[back.name] = op.results[number]
        frame.end(*(v for v in self._named(frame, new)))
        self._put(position, frame, new)

    def _released(self, position: int, kernel: Op, forward: int, gone: tuple[str, ...]) -> tuple[str, ...]:
        """What the kernel's node lets go: what it saved, and what died there before."""
        mine = dict.fromkeys(v.storage for v in self.given[forward])
        before = [f for f in self.edit.op(position).frees if f not in gone]
        return tuple(dict.fromkeys((*kernel.frees, *mine, *before)))

    def _named(self, frame: Frame, new: dict[str, Value]) -> list[Value]:
        return [r for one in frame.ops for r in one.results if r.name in new]

    def _kernel(
        self, frame: Frame, op: Op, before: tuple[Value, ...], names: dict[int, str]
    ) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The kernel on divided heads: its tensors of the shape of attention, and what else it returns (seeds)."""
        backward = op.opcode not in self.kernels
        count = 3 if backward else 2
        made = []
        for number, result in enumerate(op.results[:count]):
            shape = tuple(self._divided(extent, at) for at, extent in enumerate(result.shape))
            name = names.get(number) or frame.fresh()
            storage = result.storage if number in names else name
            made.append(replace(result, name=name, storage=storage, shape=shape, strides=_as(result, shape), offset=ZERO))
            if number not in names:
                kind = Kind.TEMPORARY if backward or not op.saves else Kind.ACTIVATION
                frame.storages.append(Storage(name, product(shape) * ITEMSIZE[result.dtype], kind))
        beside = [self.values[o] for o in op.operands]
        target = scratch_target(op, beside)
        frame.emit(
            replace(
                frame.bare(),
                opcode=op.opcode,
                operands=tuple(v.name for v in before),
                results=tuple(made),
                scratch=scratch_of(target, op.opcode, before, made) if target else op.scratch,
            )
        )
        frame.holding.append("stack", (m.storage for m in made))
        return tuple(made), op.results[count:]

    def _divided(self, extent: Size, dimension: int) -> Size:
        """An extent of the kernel's tensors: heads are divided, the sequence is whole."""
        if dimension == HEADS:
            return floor_div(extent, self.degree) if extent.is_constant else extent
        return extent.substitute({"S": Size.of("S") * self.degree})

    def _resized(self, before: Value, after: Value) -> None:
        self.values[after.name] = after
        self.edit.resize(before.storage, product(after.shape) * ITEMSIZE[after.dtype])

    def _put(self, position: int, frame: Frame, new: dict[str, Value]) -> None:
        """The frame stands in the operator's place; what it returns goes by the names that are known outside."""
        edit = self.edit
        storages = {value.storage: new[value.name].storage for value in self._named(frame, new)}
        names = {name: outer.name for name, outer in new.items()}
        ops = [rename(one, names, storages) for one in frame.ops]
        for storage in frame.storages:
            if storage.name not in storages:
                edit.declare(storage)
        now = edit.op(position)
        frees = tuple(f for f in now.frees if not any(f in one.frees for one in ops))
        ops[-1] = replace(ops[-1], frees=(*ops[-1].frees, *frees), drops=now.drops)
        *ahead, end = ops
        edit.before(position, *ahead)
        edit.put(position, end)
        made = {r.name: r for one in ops for r in one.results}
        for outer in new.values():
            after = made[outer.name]
            if after.strides != outer.strides:
                relaid(edit, self.values, outer, after, position)
                self.values[outer.name] = after


def _with_ops(flow: Flow, ops: list[Op]) -> Program:
    phases: list[tuple[str, list[Op]]] = []
    for phase, op in zip(flow.phase, ops, strict=True):
        if not phases or phases[-1][0] != phase:
            phases.append((phase, []))
        phases[-1][1].append(op)
    return replace(flow.program, phases=tuple(Phase(name, tuple(held)) for name, held in phases))


def _heads_divided(frame: Frame, value: Value, degree: int) -> Value:
    """[B, H, S, K] of the rank's tokens -> [B, H/N, N*S, K] of all (`single_all_to_all`, scatter_idx 2)."""
    batch, heads, tokens, width = value.shape
    own = floor_div(heads, degree)
    one = _in_row(frame, value)
    frame.let(input_t=one)
    sent = frame.run("aten.clone", (one,), (Size.of(degree), batch, tokens, own, width))
    frame.let(input_t=sent)
    came = frame.run("_c10d_functional.all_to_all_single", (sent,), sent.shape)
    frame.let(output=came)
    if batch is not ONE:
        came = frame.run("aten.clone", (came,), (batch, Size.of(degree), tokens, own, width))
    frame.let(res=came)
    frame.let(input_t=None, output=None)
    return _transposed(frame, came, (batch, tokens * degree, own, width))


def _sequence_divided(frame: Frame, value: Value, degree: int) -> Value:
    """[B, H/N, N*S, K] of all tokens -> [B, H, S, K] of the rank's (`single_all_to_all`, scatter_idx 1)."""
    batch, own, tokens, width = value.shape
    part = floor_div(tokens, degree)
    one = _in_row(frame, value)
    frame.let(input_t=one)
    if batch is not ONE:
        one = frame.run("aten.clone", (one,), (Size.of(degree), batch, part, own, width))
        frame.let(input_t=one)
    came = frame.run("_c10d_functional.all_to_all_single", (one,), (Size.of(degree), batch, part, own, width))
    frame.let(output=came)
    back = frame.run("aten.clone", (came,), (batch, part, Size.of(degree), own, width))
    frame.let(res=back)
    frame.let(input_t=None, output=None)
    return _transposed(frame, back, (batch, part, own * degree, width))


def _in_row(frame: Frame, value: Value) -> Value:
    """[B, H, S, K] as a contiguous [B, S, H, K]."""
    batch, heads, tokens, width = value.shape
    shape = (batch, tokens, heads, width)
    strides = tuple(value.strides[k] for k in (0, 2, 1, 3))
    if all(a == b or extent is ONE for a, b, extent in zip(strides, contiguous(shape), shape, strict=True)):
        return value
    return frame.run("aten.clone", (value,), shape)


def _transposed(frame: Frame, value: Value, shape: tuple[Size, ...]) -> Value:
    """A contiguous tensor of `shape` [B, S, H, K], seen as [B, H, S, K]."""
    strides = contiguous(shape)
    order = (0, 2, 1, 3)
    return frame.view(value, tuple(shape[k] for k in order), ZERO, tuple(strides[k] for k in order))


def _as(like: Value, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides in the order of another tensor's of the same number of dimensions, dense."""
    if like.strides == contiguous(like.shape) or len(shape) < 3:
        return contiguous(shape)
    order = (0, 2, 1, *range(3, len(shape)))
    inner = contiguous(tuple(shape[k] for k in order))
    return tuple(inner[k] for k in order)
