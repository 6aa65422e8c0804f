"""ZeRO 3: parameters too are partitioned, each on its own, gathered for the modules that use them and let go of.

deepspeed/runtime/zero: partition_parameters.py for the gathering (`all_gather_coalesced`, `AllGatherCoalescedHandle.wait`:
several parameters go through one flat buffer, one alone does not), stage3.py for gradients and the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.arrivals import Arrival, arrivals
from memir.parallel.coordinator import Coordinator, Limits
from memir.parallel.edit import Edit
from memir.parallel.emptied import empty_optimizer
from memir.parallel.flat_step import OptimizerPhase
from memir.parallel.module_calls import Call, module_calls
from memir.parallel.partitions import elements, number_of
from memir.parallel.zero_gradients import STREAM
from memir.parallel.zero_reduce import Partitioned, Sharded
from memir.rewrite.flow import Flow


@dataclass(frozen=True, slots=True)
class Weights:
    """DeepSpeed's options of these names; sizes are elements. Hosts: where partitions and optimizer states are."""

    limits: Limits
    persistence: int  # param_persistence_threshold
    bucket_size: int
    sub_group_size: int
    contiguous: bool
    scatter: bool
    offload_optimizer: bool
    offload_param: bool


def partitioned_weights(flow: Flow, axis: str, degree: int, options: Weights) -> tuple[Program, list[int]]:
    """The step of any of the ranks and each operator's origin. Errors as of stages 1 and 2, and for f32 parameters."""
    return _Weights(flow, axis, degree, options).run()


@dataclass(slots=True)
class _Handle:
    """One collective under way: its flat buffer (None: a single parameter, gathered in place), and who has not waited."""

    flat: str | None
    members: tuple[str, ...]
    waiting: set[str]
    complete: bool = False


class _Weights:
    def __init__(self, flow: Flow, axis: str, degree: int, options: Weights) -> None:
        self.flow, self.axis, self.degree, self.options, self.edit = flow, axis, degree, options, Edit(flow)
        self.arrivals = arrivals(flow)
        if not self.arrivals:
            raise UsageError(f"{axis}: the step has no gradients", where=f"program @{flow.program.name}")
        kinds = {s.name: s.kind for s in flow.program.storages}
        self.tensors = {v.storage: v for v in reversed(flow.program.values) if kinds[v.storage] == Kind.PARAMETER}
        self.order = {name: k for k, name in enumerate(n for n, kind in kinds.items() if kind == Kind.PARAMETER)}
        self.numel = {name: number_of(v) for name, v in self.tensors.items()}
        self.trained = tuple(n for n in self.order if n in {a.parameter.name for a in self.arrivals})
        self.values = {v.name: v for v in flow.program.values} | {r.name: r for op in flow.ops for r in op.results}
        self.persistent = frozenset(n for n, numel in self.numel.items() if numel <= options.persistence)
        self.calls = module_calls(flow, self.tensors, self.order)
        self.coordinator = Coordinator((), self.numel, self.persistent, options.limits)
        self.whole: dict[str, Value] = {}  # parameter -> its gathered tensor
        self.names: dict[str, dict[str, str]] = {}  # parameter -> old value -> the one in the gathered tensor
        self.handles: dict[str, _Handle] = {}
        self.count = 0

    def run(self) -> tuple[Program, list[int]]:
        """See `partitioned_weights`."""
        phase = OptimizerPhase(self.flow, self.trained)
        shards = tuple(Sharded(n, self.numel[n], self._part(n), self.tensors[n].dtype) for n in self.trained)
        reduced = Partitioned(self.edit, shards, self.degree, self.options.bucket_size, self.options)
        for name in self.order:
            self._partition(name)
        anchor = empty_optimizer(self.edit, frozenset(self.trained))
        self._sweep(reduced)
        self._let_go_before(anchor)
        reduced.step(anchor, phase, self.options.sub_group_size)
        last = self._keep_persistent(anchor)
        assert last >= 0
        return self.edit.applied([(self.axis, Size.of(self.degree))])

    def _part(self, name: str) -> int:
        return -(-self.numel[name] // self.degree)

    def _partition(self, name: str) -> None:
        """The parameter's storage becomes the rank's part; a persistent one has its whole tensor besides."""
        tensor = self.tensors[name]
        storage = self.edit.storage(name)
        nbytes = Size.of(self._part(name) * ITEMSIZE[tensor.dtype])
        device = "host" if self.options.offload_param else storage.device
        self.edit.storages[name] = replace(storage, nbytes=nbytes, device=device)
        shape = elements(self._part(name))
        self.edit.values[tensor.name] = replace(tensor, shape=shape, strides=(ONE,), offset=ZERO)
        if name in self.persistent:
            self._whole(name, live_in=True)
            self.edit.added_values.append(self.whole[name])

    def _whole(self, name: str, *, live_in: bool = False, live_out: bool = False) -> Value:
        """A new storage for the gathered parameter, as large as all parts."""
        self.count += 1
        tensor, made = self.tensors[name], f"zero.whole.{self.count}"
        padded = self._part(name) * self.degree * ITEMSIZE[tensor.dtype]
        self.edit.declare(Storage(made, Size.of(padded), Kind.PARAMETER, of=name, live_in=live_in, live_out=live_out))
        value = Value(made, tensor.dtype, tensor.shape, contiguous(tensor.shape), ZERO, made)
        self.whole[name], self.names[name] = value, {tensor.name: made}
        return value

    def _sweep(self, reduced: Partitioned) -> None:
        starts: dict[int, list[Call]] = {}
        ends: dict[int, list[Call]] = {}
        for call in self.calls:
            starts.setdefault(call.start, []).append(call)
            ends.setdefault(call.end, []).append(call)
        coming: dict[int, list[tuple[int, Arrival]]] = {}
        phases = [p for p in dict.fromkeys(self.flow.phase) if p.endswith("backward")]
        for arrival in self.arrivals:
            for number, end in enumerate(arrival.ends):
                coming.setdefault(end, []).append((number, arrival))
        last_of = {phase: max(p for p in range(len(self.flow.ops)) if self._in(p, phase)) for phase in phases}
        begins = self._begins()
        for position in range(len(self.flow.ops)):
            if position in begins:
                self._drop(position, self.coordinator.begin(begins[position]))
            for call in starts.get(position, ()):
                self._fetch(position, call)
            if not self._dropped(position):
                self._rename(position)
            for number, arrival in coming.get(position, ()):
                reduced.arrive(position, arrival, number)
            for call in ends.get(position, ()):
                if call.ends:
                    self._free(position, self.coordinator.release(call))
            if last_of.get(self.flow.phase[position]) == position:
                reduced.reduce(position)
                self._free(position, self.coordinator.leftovers())

    def _begins(self) -> dict[int, list[Call]]:
        """Where each forward begins -> the calls until the next one: DeepSpeed's trace is of one forward and backward."""
        phases = [p for p in dict.fromkeys(self.flow.phase) if p.endswith("forward")]
        firsts = [self.flow.phase.index(p) for p in phases]
        ends = [*firsts[1:], len(self.flow.ops)]
        return {a: [c for c in self.calls if a <= c.start < b] for a, b in zip(firsts, ends, strict=True)}

    def _drop(self, position: int, names: Sequence[str]) -> None:
        """Collectives whose parameters no module has come to take."""
        handles = {id(h): h for h in (self.handles.pop(name, None) for name in names) if h is not None}
        flats = [h.flat for h in handles.values() if h.flat is not None]
        alone = [self.whole.pop(h.members[0]).storage for h in handles.values() if h.flat is None]
        if flats or alone:
            self.edit.before(position, Op("memir.free", frees=(*flats, *alone)))

    def _in(self, position: int, phase: str) -> bool:
        return self.flow.phase[position] == phase and not self.flow.ops[position].opcode.startswith("memir.")

    def _dropped(self, position: int) -> bool:
        return position in self.edit.ops and self.edit.ops[position] is None

    def _fetch(self, position: int, call: Call) -> None:
        now, ahead = self.coordinator.fetch(call)
        self._gather(position, now)
        for name in call.parameters:
            handle = self.handles.pop(name, None)
            if handle is not None:
                self._wait(position, handle, name)
        self._gather(position, ahead)

    def _gather(self, position: int, names: Sequence[str]) -> None:
        """One collective: into the tensor itself for a single parameter, into a flat buffer for several."""
        if not names:
            return
        parts = tuple(self.tensors[n].name for n in names)
        scratch = ZERO
        if self.options.offload_param:
            scratch = Size.of(sum(self._part(n) * ITEMSIZE[self.tensors[n].dtype] for n in names))
        if len(names) == 1:
            value = self._whole(names[0])
            self.edit.before(position, Op("c10d._allgather_base_", parts, (value,), scratch=scratch, stream=STREAM))
            self.handles[names[0]] = _Handle(None, tuple(names), set(names), complete=True)
            return
        self.count += 1
        dtype = self.tensors[names[0]].dtype
        total = sum(self._part(n) for n in names) * self.degree
        flat = self.edit.declare(Storage(f"zero.flat.{self.count}", Size.of(total * ITEMSIZE[dtype]), Kind.COLLECTIVE))
        value = Value(flat, dtype, elements(total), (ONE,), ZERO, flat)
        self.edit.before(position, Op("c10d._allgather_base_", parts, (value,), scratch=scratch, stream=STREAM))
        handle = _Handle(flat, tuple(sorted(names, key=self.order.__getitem__)), set(names))
        for name in names:
            self.handles[name] = handle

    def _wait(self, position: int, handle: _Handle, name: str) -> None:
        """The first who waits cuts the flat buffer into tensors; it goes when all have."""
        if not handle.complete:
            handle.complete = True
            for member in handle.members:
                self.edit.before(position, Op("aten.cat", (str(handle.flat),), (self._exact(member),)))
        handle.waiting.discard(name)
        if not handle.waiting and handle.flat is not None:
            self.edit.before(position, Op("memir.free", frees=(handle.flat,)))

    def _exact(self, name: str) -> Value:
        """The tensor that is cut out of a flat buffer, without padding."""
        value = self._whole(name)
        nbytes = Size.of(self.numel[name] * ITEMSIZE[self.tensors[name].dtype])
        self.edit.resize(value.storage, nbytes)
        return value

    def _free(self, position: int, names: Sequence[str]) -> None:
        frees = tuple(self.whole.pop(name).storage for name in names if name in self.whole)
        if frees:
            self.edit.after(position, Op("memir.free", frees=frees))

    def _rename(self, position: int) -> None:
        """The operator reads the gathered tensors, and views that it makes are views of them."""
        op = self.edit.op(position)
        names: dict[str, str] = {}
        for operand in op.operands:
            value = self.values.get(operand)
            if value is None or value.storage not in self.tensors:
                continue
            whole = self.whole.get(value.storage)
            if whole is None:
                where = " ".join(filter(None, (op.opcode, f"@{op.path}", op.source)))
                raise InconclusiveError("a parameter is read when no module holds it", where=where)
            known = self.names[value.storage]
            if operand not in known:
                self.count += 1
                view = replace(value, name=f"{operand}.{self.count}", storage=whole.storage)
                self.edit.before(position, Op("aten.view", (whole.name,), (view,)))
                known[operand] = view.name
            names[operand] = known[operand]
        if names:
            self.edit.rename(position, names)
        retyped = {}
        for result in op.results:
            if result.storage in self.tensors:
                retyped[result.name] = replace(result, storage=self.whole[result.storage].storage)
                self.names[result.storage][result.name] = result.name
        if retyped:
            self.edit.retype(position, retyped)

    def _let_go_before(self, anchor: int) -> None:
        """The step begins with all parameters partitioned, the persistent ones too (`_partition_all_parameters`)."""
        flats = {h.flat for h in self.handles.values() if h.flat is not None}
        frees = (*(v.storage for v in self.whole.values()), *sorted(flats))
        self.edit.before(anchor, Op("memir.free", frees=tuple(frees))) if frees else None
        self.whole.clear()

    def _keep_persistent(self, anchor: int) -> int:
        """It ends with the persistent ones gathered again (`_post_step`)."""
        for name in sorted(self.persistent, key=self.order.__getitem__):
            value = self._whole(name, live_out=True)
            self.edit.before(anchor, Op("c10d._allgather_base_", (self.tensors[name].name,), (value,), stream=STREAM))
        return anchor
