"""One pipeline stage of a flat program: the operators of its layers, and the tensors it gets from and gives to its neighbours.

A stage is the model with the other stages' layers taken out (torchtitan/distributed/pipeline_parallel.py,
`pipeline_module_split`): what depends on no parameter (rotary tables, masks, positions) every stage computes for itself, the
hidden state comes from the stage before. What dies when, where a neighbour's operators held it, follows memir.rewrite.ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.names import full_name
from memir.rewrite.changes import Changes
from memir.rewrite.cut import EMBEDDING, Layers, layers_of, users
from memir.rewrite.ends import ends_of
from memir.rewrite.flow import Flow
from memir.rewrite.prune import drop_from_optimizer
from memir.rewrite.rebuild import rebuilt


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage does for one micro-batch, as operators of the whole program with their lifetimes as they are now.

    `enters` and `leaves` are the hidden state from the stage before and to the next (empty: first, last); `gradient` comes
    back for `leaves`, `returned` goes back for `enters` (empty where no gradient is needed). Each is one tensor, under all the
    names that it is read by; the first is what is sent.
    """

    number: int
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    origins: tuple[tuple[int, ...], tuple[int, ...]]  # positions of forward's and backward's operators in the whole program
    enters: tuple[Value, ...]
    leaves: tuple[Value, ...]
    gradient: tuple[Value, ...]
    returned: tuple[Value, ...]
    parameters: frozenset[str]  # storages
    storages: tuple[Storage, ...]  # of the operators, declared as they are now


@dataclass
class Stages:
    """A flat program of one micro-batch cut in front of the layers `cuts`."""

    flow: Flow
    cuts: tuple[int, ...]
    tied: bool = False  # a parameter of two stages is there twice
    layers: Layers = field(init=False)
    values: dict[str, Value] = field(init=False)

    def __post_init__(self) -> None:
        flow = self.flow
        self.layers = layers_of(flow)
        self.values = {v.name: v for v in flow.program.values} | {r.name: r for op in flow.ops for r in op.results}
        self._owner = self._owners()
        self._varying = self._parameter_dependent()
        self._sums = self._sums_of_tied()
        self._check_shared()

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1

    def parameters(self, number: int) -> frozenset[str]:
        """The parameters' storages of a stage: those its layers read, and those that lie in its layers."""
        used = users(self.flow, self.layers)
        names = {name for name, places in used.items() if any(self._stage_of_layer(p) == number for p in places)}
        for storage in self.flow.program.storages:
            if storage.kind == Kind.PARAMETER and storage.name not in used and self._home(storage.name) == number:
                names.add(storage.name)
        return frozenset(names)

    def stage(self, number: int) -> Stage:
        """The stage of that number. InconclusiveError where its layers need more of others than the hidden state."""
        flow = self.flow
        kept = {p for p, owner in self._owner.items() if owner == number}
        kept |= self._prelude(kept)
        kept -= self._sums.keys()
        parameters = self.parameters(number)
        everything = {s.name for s in flow.program.storages if s.kind == Kind.PARAMETER}
        changes = Changes(flow, frozenset(everything - parameters))
        changes.removed |= {p for p, name in enumerate(flow.phase) if p not in kept and _in_micro(name)}
        changes.removed |= {p for p, name in enumerate(flow.phase) if not _in_micro(name)}
        changes.saves = {p: flow.ops[p].saves for p in kept if flow.ops[p].saves}
        program, origins = rebuilt(changes, ends_of(changes))
        halves: dict[bool, list[tuple[Op, int]]] = {True: [], False: []}
        for (phase, op), origin in zip(program.ops(), origins, strict=True):
            if _in_micro(phase.name):
                halves[phase.name.endswith("forward")].append((self._untied(op, number), origin))
        return Stage(
            number,
            tuple(op for op, _ in halves[True]),
            tuple(op for op, _ in halves[False]),
            (tuple(o for _, o in halves[True]), tuple(o for _, o in halves[False])),
            self._boundary(number, forward=True),
            self._boundary(number + 1, forward=True),
            self._boundary(number + 1, forward=False),
            self._boundary(number, forward=False),
            parameters,
            program.storages,
        )

    def _owners(self) -> dict[int, int]:
        """The stage of every operator of forward and backward."""
        flow = self.flow
        owner = {p: self._stage_of_layer(layer) for p, layer in self.layers.of.items()}
        current = self.count - 1
        for position, op in enumerate(flow.ops):
            if position in owner or not flow.phase[position].endswith("backward"):
                continue
            if op.forward_of is not None:
                current = owner[flow.made[op.forward_of]]
            owner[position] = current
        return owner

    def _stage_of_layer(self, layer: int) -> int:
        if layer == EMBEDDING:
            return 0
        if layer >= self.layers.depth:
            return self.count - 1
        return sum(layer >= cut for cut in self.cuts)

    def _home(self, name: str) -> int:
        """The stage of a storage by its name: that of its layer, or the first."""
        rest = full_name(name).partition(f"{self.layers.path}.")[2]
        number = rest.partition(".")[0]
        return self._stage_of_layer(int(number)) if number.isdigit() else 0

    def has(self, storage: Storage, reads: Collection[str], number: int) -> bool:
        """Whether a buffer or input is on a stage that reads these: its layers' own, what it reads, what nobody reads."""
        inside = full_name(storage.name).partition(f"{self.layers.path}.")
        if inside[1] and inside[2].partition(".")[0].isdigit():
            return self._home(storage.name) == number
        if storage.kind == Kind.BUFFER and storage.name not in self._read():
            return True
        return storage.name in reads

    def _read(self) -> set[str]:
        return {name for position in range(len(self.flow.ops)) for name in self.flow.reads(position)}

    def _parameter_dependent(self) -> set[str]:
        """The storages whose content depends on a parameter."""
        found = {s.name for s in self.flow.program.storages if s.kind == Kind.PARAMETER}
        for position, op in enumerate(self.flow.ops):
            if self.flow.reads(position) & found:
                found |= {r.storage for r in op.results}
        return found

    def _prelude(self, kept: set[int]) -> set[int]:
        """The operators of earlier stages that this one runs for itself: their results depend on no parameter."""
        flow = self.flow
        needed = {name for p in kept for name in flow.reads(p)} - self._varying
        more: set[int] = set()
        for position in range(len(flow.ops) - 1, -1, -1):
            op = flow.ops[position]
            makes = {r.storage for r in op.results}
            if position in kept or not flow.is_forward(position) or flow.repeated[position] or not makes & needed:
                continue
            if makes <= self._varying:
                continue
            more.add(position)
            needed |= flow.reads(position)
        return more

    def _check_shared(self) -> None:
        if self.tied:
            return
        for name, places in users(self.flow, self.layers).items():
            if len({self._stage_of_layer(p) for p in places}) > 1:
                raise UsageError(
                    "pipeline-parallel: two stages use one parameter, and each stage has parameters of its own",
                    where=full_name(name),
                    hint="untie it in the model's config, or tied=copy: a copy on each, as in Megatron",
                )

    def tied_gradients(self) -> tuple[Value, ...]:
        """The gradients of parameters that several stages have."""
        return tuple(self._sums.values())

    def _sums_of_tied(self) -> dict[int, Value]:
        """The additions of one parameter's gradients from two stages: position -> the whole gradient."""
        flow = self.flow
        gradients = {s.name for s in flow.program.storages if s.kind == Kind.GRADIENT}
        found = {}
        for position, op in enumerate(flow.ops):
            if flow.gathers[position] and op.results[0].storage in gradients:
                owners = {self._owner[flow.made[o]] for o in op.operands if flow.made.get(o) in self._owner}
                if len(owners) > 1:
                    found[position] = op.results[0]
        return found

    def _untied(self, op: Op, number: int) -> Op:
        """Where gradients of one parameter from two stages would meet, each stage's own is the gradient."""
        flow = self.flow
        for position, whole in self._sums.items():
            for operand in flow.ops[position].operands:
                made = flow.made.get(operand)
                if made is None or self._owner[made] != number:
                    continue
                op = rename(op, {operand: whole.name}, {flow.storage[operand]: whole.storage})
                op = replace(op, frees=tuple(n for n in op.frees if n != whole.storage))
        return op

    def _boundary(self, number: int, *, forward: bool) -> tuple[Value, ...]:
        """The tensor that goes over the boundary in front of stage `number`: a hidden state, or its gradient coming back."""
        if not 0 < number < self.count:
            return ()
        flow = self.flow
        found: dict[str, Value] = {}
        for position, owner in self._owner.items():
            if flow.is_forward(position) != forward or (flow.repeated[position] and forward):
                continue
            if (owner >= number) != forward or position in self._sums:
                continue
            for operand in flow.ops[position].operands:
                made = flow.made.get(operand)
                if made is None or flow.storage[operand] not in self._varying or made not in self._owner:
                    continue
                if flow.is_forward(made) == forward and (self._owner[made] < number) == forward:
                    found[operand] = self.values[operand]
        found = {name: v for name, v in found.items() if not self._is_parameters(v.storage)}
        if len({v.storage for v in found.values()}) > 1 or (forward and not found):
            names = ", ".join(sorted(found)[:4]) or "nothing"
            raise InconclusiveError(
                f"pipeline-parallel: stage {number} needs more of those before it than one hidden state: {names}",
                hint="a pipeline passes one tensor from stage to stage",
            )
        for value in found.values():
            whole = next(s.nbytes for s in flow.program.storages if s.name == value.storage)
            if value.strides != contiguous(value.shape) or product(value.shape) * ITEMSIZE[value.dtype] != whole:
                message = "pipeline-parallel: what stages pass on is a part of a larger tensor, or not contiguous"
                raise InconclusiveError(message, where=value.name)
        return tuple(found.values())

    def _is_parameters(self, storage: str) -> bool:
        return any(s.name == storage and s.kind in (Kind.PARAMETER, Kind.GRADIENT) for s in self.flow.program.storages)


def _in_micro(phase: str) -> bool:
    return phase.endswith(("forward", "backward"))


def without_parameters(flow: Flow, absent: Collection[str]) -> tuple[Program, list[int]]:
    """The program whose optimizer knows nothing of the absent parameters; forward and backward are empty."""
    changes = Changes(flow, frozenset(absent))
    changes.removed |= {p for p, name in enumerate(flow.phase) if _in_micro(name)}
    drop_from_optimizer(changes)
    changes.gone |= {value for value, storage in flow.storage.items() if storage in changes.frozen}
    return rebuilt(changes, ends_of(changes))


def rename(op: Op, values: dict[str, str], storages: dict[str, str]) -> Op:
    """The operator under other names."""

    def moved(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(storages.get(n, n) for n in names)

    return replace(
        op,
        operands=tuple(values.get(o, o) for o in op.operands),
        results=tuple(
            replace(r, name=values.get(r.name, r.name), storage=storages.get(r.storage, r.storage)) for r in op.results
        ),
        frees=moved(op.frees),
        drops=moved(op.drops),
        saves=moved(op.saves),
        forward_of=None if op.forward_of is None else values.get(op.forward_of, op.forward_of),
    )
