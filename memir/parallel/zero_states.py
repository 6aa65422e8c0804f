"""ZeRO 1 and 2: optimizer states and fp32 weights of a part, gradients of a part or of all, parameters whole.

deepspeed/runtime/zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer`: its constructor for what is resident, `step` for the
optimizer.
"""

from __future__ import annotations

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.arrivals import Arrival, arrivals
from memir.parallel.coming import taken
from memir.parallel.edit import Edit
from memir.parallel.emptied import empty_optimizer
from memir.parallel.flat_step import MASTER, Flat, OptimizerPhase
from memir.parallel.partitions import Group, elements, flat_groups
from memir.parallel.zero_gradients import NORM, STREAM, Gradients, Ready, Reduction
from memir.rewrite.flow import Flow


def partitioned_states(flow: Flow, axis: str, degree: int, options: Reduction, *, robin: bool) -> tuple[Program, list[int]]:
    """The step of rank `options.rank` and each operator's origin.

    UsageError for a step without gradients or optimizer, InconclusiveError for an optimizer that cannot be partitioned.
    """
    return _States(flow, axis, degree, options, robin).run()


class _States:
    def __init__(self, flow: Flow, axis: str, degree: int, options: Reduction, robin: bool) -> None:
        self.flow, self.axis, self.degree, self.options, self.edit = flow, axis, degree, options, Edit(flow)
        self.arrivals = arrivals(flow)
        if not self.arrivals:
            raise UsageError(f"{axis}: the step has no gradients", where=f"program @{flow.program.name}")
        self.trained = frozenset(a.parameter.name for a in self.arrivals)
        self.tensors = {v.storage: v for v in reversed(flow.program.values) if v.storage in self.trained}
        missing = sorted(self.trained - self.tensors.keys())
        if missing:
            raise InconclusiveError("a trained parameter has no tensor before the step", where=missing[0])
        self.phase = OptimizerPhase(flow, tuple(self.trained))
        self.names = self.phase.groups()
        self.stands = [members[-1] for members in self.names]  # the parameter whose operators are the group's
        self.groups = flat_groups(self.names, self.tensors, degree, robin=robin)
        dtypes = {g.dtype for g in self.groups}
        if len(dtypes) > 1:
            raise InconclusiveError(f"{axis}: trained parameters are {' and '.join(sorted(dtypes))}, not of one dtype")
        self.gradients = Gradients(self.edit, self.groups, options)

    def run(self) -> tuple[Program, list[int]]:
        """See `partitioned_states`."""
        flats = [self._resident(number, group) for number, group in enumerate(self.groups)]
        if self.options.offload:
            self._offloaded()
        anchor = empty_optimizer(self.edit, self.trained)
        kept = self._backward()
        self._step(anchor, flats, kept)
        return self.edit.applied([(self.axis, Size.of(self.degree))])

    def _flat(self, name: str, numel: int, dtype: str, kind: Kind, *, stays: bool, device: str = "gpu") -> Value:
        self.edit.declare(Storage(name, Size.of(numel * ITEMSIZE[dtype]), kind, device, live_in=stays, live_out=stays))
        value = Value(name, dtype, elements(numel), (ONE,), ZERO, name)
        self.edit.added_values += [value] if stays else []
        return value

    def _resident(self, number: int, group: Group) -> Flat:
        """The padding of the flat parameters, the part's master and its place for the gradient."""
        if group.padded > group.numel:
            self._flat(f"zero.padding{number}", group.padded - group.numel, group.dtype, Kind.PARAMETER, stays=True)
        name, offload = f"zero.part{number}", self.options.offload
        device = "host" if offload else "gpu"
        master = self._flat(f"{name}.master", group.partition, MASTER, Kind.OPTIMIZER_STATE, stays=True, device=device)
        gradient = self._flat(f"{name}.gradient", group.partition, MASTER, Kind.GRADIENT, stays=offload, device=device)
        if offload:  # what the new weights are copied through
            self._flat(f"{name}.weights", group.partition, group.dtype, Kind.PARAMETER, stays=True, device=device)
        return Flat(name, group.partition, master, gradient, device)

    def _offloaded(self) -> None:
        """Buffers as large as the largest parameter, and with several micro-batches a place for each gradient on the host."""
        numels = [(name, n) for g in self.groups for name, n in g.parameters]
        dtype, largest = self.groups[0].dtype, max(n for _, n in numels)
        for device in ("gpu", "host"):
            self._flat(f"zero.passing.{device}", largest, dtype, Kind.TEMPORARY, stays=True, device=device)
        if max(len(a.ends) for a in self.arrivals) > 1:
            total = sum(n for name, n in numels if name in self.gradients.mine)
            self._flat("zero.accumulated", total, dtype, Kind.GRADIENT, stays=True, device="host")

    def _backward(self) -> list[str]:
        """All backward phases; the storages that hold the rank's gradients after the last."""
        phases = [p for p in dict.fromkeys(self.flow.phase) if p.endswith("backward")]
        kept: list[str] = []
        for number, phase in enumerate(phases):
            boundary = number == len(phases) - 1
            coming = sorted((a for a in self.arrivals if number < len(a.ends)), key=lambda a: a.ends[number])
            last = max(p for p, name in enumerate(self.flow.phase) if name == phase and self._runs(p))
            if self.options.partition:
                self._stage2(coming, number)
            else:
                self._stage1(coming, number, last, boundary=boundary)
                if not boundary:
                    continue
            found = self.gradients.epilogue(last, boundary=boundary)
            if kept and found:  # added to those of the micro-batches before
                padding = [s for s in found if s.startswith("zero.padding.")]
                self.edit.after(last, Op("memir.free", frees=tuple(s for s in found if s not in padding)))
                kept += padding
            else:
                kept += found
        return kept

    def _runs(self, position: int) -> bool:
        return not self.flow.ops[position].opcode.startswith("memir.")

    def _stage2(self, coming: list[Arrival], number: int) -> None:
        for arrival in coming:
            end = arrival.ends[number]
            self.gradients.setup(end)
            self.gradients.arrive(end, self._ready(arrival, number))

    def _stage1(self, coming: list[Arrival], number: int, last: int, *, boundary: bool) -> None:
        self.gradients.setup(coming[0].ends[number])
        if not boundary:
            return
        if self.options.overlap:
            for arrival in coming:
                self.gradients.arrive(arrival.ends[number], self._ready(arrival, 0))
            return
        by_name = {a.parameter.name: a for a in coming}
        for members in self.names:  # after backward, in the model's order
            for name in members:
                self.gradients.arrive(last, self._ready(by_name[name], 0))

    def _ready(self, arrival: Arrival, number: int) -> Ready:
        storage, value = taken(self.edit, arrival, number)
        return Ready(arrival.parameter.name, self._numel(arrival), storage, value)

    def _numel(self, arrival: Arrival) -> int:
        return next(n for g in self.groups for name, n in g.parameters if name == arrival.parameter.name)

    def _step(self, anchor: int, flats: list[Flat], kept: list[str]) -> None:
        """Norms, then group by group: one flat fp32 gradient, the optimizer's operators, and the new weights from all ranks."""
        held = tuple(self.gradients.values[name] for name in kept)
        frees_all = tuple(kept)
        for group in self.groups if not self.options.offload else ():
            for piece in group.pieces(self.options.rank):
                self.edit.before(anchor, Op("aten.linalg_vector_norm", held[:1], scratch=Size.of(NORM * piece.numel)))
        for number, (group, flat) in enumerate(zip(self.groups, flats, strict=True)):
            last = number == len(self.groups) - 1
            if not self.options.offload:
                self._one_gradient(anchor, group, flat, held, frees=frees_all if last else ())
            step = self.phase.of(self.stands[number], flat)
            for storage in (*step.states, *step.temporaries):
                self.edit.declare(storage)
            self.edit.added_values += step.values
            self.edit.before(anchor, *step.ops)
            frees = () if self.options.offload else (flat.gradient.storage,)
            self.edit.before(anchor, Op("aten.copy_", (flat.master.name,), frees=frees))
        names = tuple(self.tensors[n].name for g in self.groups for n, _ in g.parameters)
        self.edit.before(anchor, Op("c10d._allgather_base_", names, stream=STREAM))

    def _one_gradient(self, anchor: int, group: Group, flat: Flat, held: tuple[str, ...], frees: tuple[str, ...]) -> None:
        many = len(group.pieces(self.options.rank)) + (group.padded > group.numel) > 1
        if group.dtype == MASTER or not many:
            self.edit.before(anchor, Op("aten._to_copy", held, (flat.gradient,), frees=frees))
            return
        joined = self._flat(f"{flat.name}.joined", group.partition, group.dtype, Kind.TEMPORARY, stays=False)
        self.edit.before(
            anchor,
            Op("aten.cat", held, (joined,)),
            Op("aten._to_copy", (joined.name,), (flat.gradient,), frees=(joined.storage, *frees)),
        )
