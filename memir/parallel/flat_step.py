"""The optimizer's step on flat partitions: what it did to the tensors of each parameter, it does to one flat tensor.

torch.optim's steps for Adam and its kind work element by element, so the operators on one parameter are those on a flat
partition, with other sizes and in fp32. The last parameter of each group stands for it: what a loop over parameters holds
until its next turn is then gone when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.shards import in_optimizer
from memir.rewrite.flow import Flow

MASTER = "f32"  # deepspeed: `master_weights_and_grads_dtype`
_LOW = ("bf16", "f16")


@dataclass(frozen=True, slots=True)
class FlatStep:
    """One flat partition's part of the step: `states` besides the master (alive from step to step), and the operators."""

    states: tuple[Storage, ...]
    values: tuple[Value, ...]  # of the states, before the step
    temporaries: tuple[Storage, ...]
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Flat:
    """A partition to be stepped: a `name` for what belongs to it, its elements, its master and gradient, and its device."""

    name: str
    numel: int
    master: Value
    gradient: Value
    device: str = "gpu"


class OptimizerPhase:
    """The optimizer's phase of a flat program, by parameter."""

    def __init__(self, flow: Flow, trained: Sequence[str]) -> None:
        self.flow, self.trained = flow, frozenset(trained)
        self.storages = {s.name: s for s in flow.program.storages}
        self.values = {v.name: v for v in flow.program.values} | {r.name: r for op in flow.ops for r in op.results}
        self.shapes = {v.storage: v.shape for v in flow.program.values if v.storage in self.trained}
        self.positions = [p for p in range(len(flow.ops)) if in_optimizer(flow.phase[p])]
        self.owner: dict[str, str] = {}  # value -> the parameter it belongs to
        self.of_gradient: set[str] = set()  # values that nothing but gradients make: clipping's
        self._own()

    def _own(self) -> None:
        for name, value in self.values.items():
            storage = self.storages[value.storage]
            parameter = storage.name if storage.name in self.trained else storage.of if storage.of in self.trained else None
            if parameter is not None:
                self.owner[name] = parameter
                if storage.kind == Kind.GRADIENT:
                    self.of_gradient.add(name)
        for position in self.positions:
            op = self.flow.ops[position]
            listed = "_foreach_" in op.opcode and len(op.results) > 1
            only = all(o in self.of_gradient or o not in self.owner for o in op.operands)
            for number, result in enumerate(op.results):
                source = [op.operands[number]] if listed else op.operands
                owner = next((self.owner[o] for o in source if o in self.owner), None)
                if owner is not None and result.name not in self.owner:
                    self.owner[result.name] = owner
                    if only:
                        self.of_gradient.add(result.name)

    def groups(self) -> list[list[str]]:
        """The optimizer's parameter groups: parameters of one list operator, or with the same operators, in order."""
        signature: dict[str, list[str]] = {name: [] for name in self.storages if name in self.trained}
        for position in self.positions:
            op = self.flow.ops[position]
            mark = f"{op.opcode}@{position}" if "_foreach_" in op.opcode or "_fused_" in op.opcode else op.opcode
            for name in {self.owner[o] for o in op.operands if o in self.owner and o not in self.of_gradient}:
                signature[name].append(mark)
        found: dict[tuple[str, ...], list[str]] = {}
        for name, marks in signature.items():
            found.setdefault(tuple(marks), []).append(name)
        return list(found.values())

    def of(self, parameter: str, flat: Flat) -> FlatStep:
        """What the optimizer does to the parameter, done to `flat`. InconclusiveError if not done element by element."""
        return _Copy(self, parameter, flat).run()


class _Copy:
    def __init__(self, phase: OptimizerPhase, parameter: str, flat: Flat) -> None:
        self.phase, self.parameter, self.flat = phase, parameter, flat
        self.shape = phase.shapes[parameter]
        self.storages: dict[str, str] = {parameter: flat.master.storage}
        self.states: list[Storage] = []
        self.values: list[Value] = []
        self.temporaries: list[Storage] = []
        self.names: dict[str, str] = {}

    def run(self) -> FlatStep:
        for value in self.phase.flow.program.values:
            storage = self.phase.storages[value.storage]
            if storage.of == self.parameter and storage.kind == Kind.OPTIMIZER_STATE:
                self._state(value, storage)
        chosen = [p for p in self.phase.positions if self._steps(p)]
        made = dict.fromkeys(name for position in chosen for name in self._temporaries_of(position))
        freed = {name: self.phase.flow.freed.get(name, chosen[-1]) for name in made}
        ends = {name: max(p for p in chosen if p <= position) for name, position in freed.items()}  # as they were seen to die
        ops = [self._op(p, frees=tuple(n for n, end in ends.items() if end == p)) for p in chosen]
        return FlatStep(tuple(self.states), tuple(self.values), tuple(self.temporaries), tuple(ops))

    def _state(self, value: Value, storage: Storage) -> None:
        suffix = storage.name.removeprefix(self.parameter.partition("[")[0]).partition("[")[0].lstrip(".")
        name = f"{self.flat.name}.{suffix}"
        whole = value.shape == self.shape
        if not whole and product(value.shape) is not ONE:
            message = "an optimizer state has neither its parameter's shape nor one element: ZeRO cannot partition it"
            raise InconclusiveError(message, where=storage.name)
        made = self._sized(value, name, name)
        nbytes = product(made.shape) * ITEMSIZE[made.dtype]
        device = self.flat.device if whole else storage.device
        self.states.append(Storage(name, nbytes, Kind.OPTIMIZER_STATE, device, live_in=True, live_out=True))
        self.values.append(made)
        self.storages[storage.name], self.names[value.name] = name, name

    def _sized(self, value: Value, name: str, storage: str) -> Value:
        """The value for the flat tensor: as many elements, and fp32 where it was of a low precision."""
        dtype = MASTER if value.dtype in _LOW else value.dtype
        if product(value.shape) is ONE and product(self.shape) is not ONE:
            return Value(name, dtype, value.shape, value.strides, ZERO, storage)
        if product(value.shape) != product(self.shape):
            raise InconclusiveError("the optimizer does not work element by element, as ZeRO needs it", where=value.name)
        return Value(name, dtype, (Size.of(self.flat.numel),), (ONE,), ZERO, storage)

    def _steps(self, position: int) -> bool:
        """Whether the operator is part of the parameter's step, and not of clipping."""
        op, phase = self.phase.flow.ops[position], self.phase
        mine = [o for o in op.operands if phase.owner.get(o) == self.parameter]
        return any(o not in phase.of_gradient for o in mine)

    def _temporaries_of(self, position: int) -> list[str]:
        """The temporaries of this parameter that the operator touches."""
        op, phase = self.phase.flow.ops[position], self.phase
        names = [*op.operands, *(r.name for r in op.results)]
        mine = [phase.values[n].storage for n in names if phase.owner.get(n) == self.parameter and n not in phase.of_gradient]
        return [s for s in dict.fromkeys(mine) if s in phase.flow.born and in_optimizer(phase.flow.phase[phase.flow.born[s]])]

    def _op(self, position: int, frees: tuple[str, ...]) -> Op:
        op, phase = self.phase.flow.ops[position], self.phase
        results = [self._result(r) for r in op.results if phase.owner.get(r.name) == self.parameter]
        operands = [self._operand(o) for o in op.operands if phase.owner.get(o) == self.parameter]
        gone = tuple(self.storages[name] for name in frees)
        return replace(op, operands=tuple(operands), results=tuple(results), frees=gone, drops=(), saves=(), scratch=ZERO)

    def _operand(self, name: str) -> str:
        if name in self.names:
            return self.names[name]
        if name in self.phase.of_gradient:
            return self.flat.gradient.name
        return self.flat.master.name

    def _result(self, value: Value) -> Value:
        name = f"{self.flat.name}.{value.name}"
        if value.storage not in self.storages:
            self.storages[value.storage] = made = f"{self.flat.name}.{value.storage}"
            sized = self._sized(value, name, made)
            nbytes = product(sized.shape) * ITEMSIZE[sized.dtype]
            self.temporaries.append(Storage(made, nbytes, Kind.TEMPORARY, self.flat.device))
        made_value = self._sized(value, name, self.storages[value.storage])
        self.names[value.name] = name
        return made_value
