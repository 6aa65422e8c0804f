"""c10d's Reducer on one flat step: gradients into buckets, over the ranks, and back (csrc/distributed/c10d/reducer.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.arrivals import Arrival, arrivals
from memir.parallel.buckets import assigned
from memir.parallel.edit import Edit
from memir.parallel.names import beside
from memir.rewrite.flow import Flow

BROADCAST = 250 * 2**20  # DistributedDataParallel.broadcast_bucket_size, bytes
_IN_FLIGHT = 2  # broadcasts at a time (comm.cpp, `broadcast_coalesced`)
_STREAM = "nccl"


@dataclass(frozen=True, slots=True)
class Buckets:
    """How the gradients are reduced.

    view: gradients are views of the buckets. compressed: the dtype that is sent in place of the gradients' own, None for
    theirs. limits: bytes after which the first, the second, ... bucket is full. broadcast: buffers come from rank 0 in each
    step. used: which parameters were used is kept (static_graph does that too, `set_static_graph`). every: gradients are
    reduced after each backward phase, not only the last.
    """

    view: bool
    compressed: str | None
    limits: tuple[int, ...]
    broadcast: bool
    used: bool
    every: bool = False


def reduced(flow: Flow, axis: str, degree: int, buckets: Buckets) -> tuple[Program, list[int]]:
    """The step of one of `degree` ranks, each of which has the whole model, and each operator's origin.

    UsageError for a step without gradients.
    """
    return _Reducer(flow, axis, buckets).run(degree)


class _Reducer:
    def __init__(self, flow: Flow, axis: str, options: Buckets) -> None:
        self.options, self.axis, self.flow, self.edit = options, axis, flow, Edit(flow)
        self.arrivals = arrivals(flow)
        if not self.arrivals:
            raise UsageError(f"{axis}: the step has no gradients", where=f"program @{flow.program.name}")
        self.gone: set[int] = set()  # frees of gradients that nothing makes any more
        self.tensors = {v.storage: v for v in reversed(flow.program.values)}
        self.values = {r.name: r for op in flow.ops for r in op.results}
        place = {s.name: k for k, s in enumerate(flow.program.storages)}  # declared in order, families stay families
        self.shares = {a.gradient.name: self._share(a) for a in sorted(self.arrivals, key=lambda a: place[a.parameter.name])}

    def run(self, degree: int) -> tuple[Program, list[int]]:
        """See `reduced`."""
        self._broadcast_buffers()
        rounds = max(len(a.ends) for a in self.arrivals)
        for number in range(0 if self.options.every else rounds - 1, rounds):
            self._round(number, [a for a in self.arrivals if number < len(a.ends)])
        if self.options.used:
            self._used_map()
        return self.edit.applied([(self.axis, Size.of(degree))])

    def _round(self, number: int, arriving: Sequence[Arrival]) -> None:
        """What one backward phase reduces: its gradients in the order in which they come."""
        ordered = sorted(arriving, key=lambda a: a.ends[number])
        suffix = f".{number}" if self.options.every and number else ""
        for arrival in ordered:
            self._reduce(arrival, arrival.ends[number], suffix, first=number == 0 or not self.options.every)
        if self.options.compressed is not None:
            self._compress(self.options.compressed, [(a, a.ends[number]) for a in ordered], suffix)
        if not self.options.view:
            grads = [self._gradient(a, a.ends[number]).name for a in ordered]
            shares = [self.shares[a.gradient.name].name for a in ordered]
            self.edit.after(ordered[-1].ends[number], Op("aten._foreach_copy_", (*grads, *shares)))

    def _share(self, arrival: Arrival) -> Value:
        """A parameter's part of its bucket: elements as the parameter has them, alive from step to step."""
        tensor = self.tensors.get(arrival.parameter.name)
        if tensor is None:
            raise InconclusiveError("a trained parameter has no tensor before the step", where=arrival.parameter.name)
        kind = Kind.GRADIENT if self.options.view else Kind.COLLECTIVE
        nbytes = product(tensor.shape) * ITEMSIZE[tensor.dtype]
        of = arrival.parameter.name
        name = self.edit.declare(Storage(beside(of, "bucket"), nbytes, kind, of=of, live_in=True, live_out=True))
        value = replace(tensor, name=name, strides=contiguous(tensor.shape), offset=ZERO, storage=name)
        self.edit.added_values.append(value)
        return value

    def _gradient(self, arrival: Arrival, end: int) -> Value:
        """The gradient as it is there."""
        for position in range(end, -1, -1):
            for value in self.flow.ops[position].results:
                if value.storage == arrival.gradient.name:
                    return value
        raise InconclusiveError("a gradient that no operator makes", where=arrival.gradient.name)

    def _reduce(self, arrival: Arrival, end: int, suffix: str, *, first: bool) -> None:
        """The gradient goes into its share (divided by the number of ranks), which is summed over the ranks."""
        share, gradient = self.shares[arrival.gradient.name], self._gradient(arrival, end)
        copied = replace(share, name=beside(share.name, f"in{suffix}"))
        opcode = "aten.mul.out" if self.options.compressed is None else "aten.copy_"
        if not self.options.view:
            self.edit.after(end, Op(opcode, (gradient.name, share.name), (copied,)))
        elif first:
            views = self._repoint(arrival, end)
            frees = (arrival.gradient.name,)
            self.edit.after(end, Op(opcode, (gradient.name, share.name), (copied, *views), frees=frees))
        else:  # it is in the bucket already
            self.edit.after(end, Op("aten.mul_.Tensor", (share.name,), (copied,)))
        if self.options.compressed is None:
            summed = replace(share, name=beside(share.name, f"sum{suffix}"))
            self.edit.after(end, Op("c10d.allreduce_", (copied.name,), (summed,), stream=_STREAM))

    def _repoint(self, arrival: Arrival, end: int) -> list[Value]:
        """From here on whatever read the gradient reads its share; the views that it needs."""
        name, share = arrival.gradient.name, self.shares[arrival.gradient.name]
        self._forget(arrival)
        views: dict[str, Value] = {}
        for position in range(end + 1, len(self.flow.ops)):
            if position in self.gone:
                continue
            op = self.edit.op(position)
            for operand in op.operands:
                value = self.values.get(operand)
                if value is not None and value.storage == name and self.flow.made[operand] <= end:
                    views[operand] = replace(value, name=beside(operand, "bucket"), storage=share.storage)
            if any(o in views for o in op.operands):
                self.edit.rename(position, {o: v.name for o, v in views.items()})
            self.edit.retype(position, {r.name: replace(r, storage=share.storage) for r in op.results if r.storage == name})
        return list(views.values())

    def _forget(self, arrival: Arrival) -> None:
        """What held the gradient until zero_grad holds a view: this step's, and with zero_grad first the one before."""
        of, name = arrival.parameter.name, arrival.gradient.name
        for storage in self.flow.program.storages:
            if storage.of != of or storage.kind != Kind.GRADIENT:
                continue
            position = self.edit.take_free(storage.name)
            if position is not None:
                op = self.edit.op(position)
                if op.opcode == "memir.free" and not op.frees:
                    self.edit.put(position, None)
                    self.gone.add(position)
            if storage.name == name:
                self.edit.storages[name] = replace(storage, live_out=False)
            else:
                self.edit.forget(storage.name)
                for value in self.flow.program.values:
                    if value.storage == storage.name:
                        self.edit.values[value.name] = None

    def _compress(self, dtype: str, arriving: Sequence[tuple[Arrival, int]], suffix: str) -> None:
        """Each bucket, once its last gradient is there, as a copy of 2 bytes an element, which is sent in its place."""
        shares = [self.shares[a.gradient.name] for a, _ in arriving]
        sizes = [(s.dtype, product(s.shape) * ITEMSIZE[s.dtype]) for s in shares]
        for number, members in enumerate(assigned(sizes, self.options.limits)):
            inside = [shares[k] for k in members]
            if inside[0].dtype == dtype:
                raise InconclusiveError(f"{self.axis}: gradients are {dtype} already", hint="hook=none")
            sent = self._flat_of(f"compressed.{number}{suffix}", dtype, inside)
            names = tuple(beside(s.name, f"in{suffix}") for s in inside)
            at = arriving[members[-1]][1]
            summed = replace(sent, name=f"{sent.name}.sum")
            self.edit.after(
                at,
                Op("aten._to_copy", names, (sent,)),
                Op("c10d.allreduce_", (sent.name,), (summed,), stream=_STREAM),
                Op("aten._foreach_copy_", (*names, summed.name), frees=(sent.storage,)),
            )

    def _flat_of(self, name: str, dtype: str, inside: Sequence[Value]) -> Value:
        numel = sum((product(v.shape) for v in inside), start=ZERO)
        self.edit.declare(Storage(name, numel * ITEMSIZE[dtype], Kind.COLLECTIVE))
        return Value(name, dtype, (numel,), (ONE,), ZERO, name)

    def _broadcast_buffers(self) -> None:
        """Buffers come from rank 0 ahead of the first forward, those of one dtype in one flat copy (comm.cpp,
        `broadcast_coalesced`); a buffer that is alone is sent as it is."""
        kinds = {s.name: s for s in self.flow.program.storages}
        buffers = [v for v in self.tensors.values() if kinds[v.storage].kind == Kind.BUFFER]
        if not self.options.broadcast or not buffers:
            return
        buffers.sort(key=lambda v: list(kinds).index(v.storage))
        sizes = [(v.dtype, product(v.shape) * ITEMSIZE[v.dtype]) for v in buffers]
        chunks = [[buffers[k] for k in members] for members in assigned(sizes, (BROADCAST,))]
        start = next(p for p, op in enumerate(self.flow.ops) if not op.opcode.startswith("memir."))
        flying: list[Op] = []
        for number, inside in enumerate(chunks):
            if len(flying) == _IN_FLIGHT:
                self.edit.before(start, flying.pop(0))
            if len(inside) == 1:
                sent, back = inside[0], Op("c10d.wait", (inside[0].name,))
            else:
                sent = self._flat_of(f"buffers.{number}", inside[0].dtype, inside)
                names = tuple(v.name for v in inside)
                self.edit.before(start, Op("aten.cat", names, (sent,)))
                back = Op("aten._foreach_copy_", (*names, sent.name), frees=(sent.storage,))
            self.edit.before(start, Op("c10d.broadcast_", (sent.name,), stream=_STREAM))
            flying.append(back)
        self.edit.before(start, *flying)

    def _used_map(self) -> None:
        """Which parameters were used, four bytes each, on the GPU and on the host (`initialize_local_used_map`)."""
        nbytes = Size.of(4 * len(self.arrivals))
        for device in ("gpu", "host"):
            name = self.edit.declare(
                Storage(f"used_parameters.{device}", nbytes, Kind.COLLECTIVE, device, live_in=True, live_out=True)
            )
            shape = (Size.of(len(self.arrivals)),)
            self.edit.added_values.append(Value(name, "i32", shape, (ONE,), ZERO, name))
