"""The program of a pipeline rank while it is put together: declarations, phases, and the names of each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memir.ir.core import Kind, Op, Storage, Value
from memir.parallel.holding import Holding
from memir.parallel.schedules import Action, Schedule
from memir.parallel.stages import Stage, Stages


@dataclass(frozen=True, slots=True)
class Plan:
    """How a rank runs: its stages, its actions in order, and the options of PyTorch's schedule."""

    stages: tuple[int, ...]
    schedule: Schedule
    order: tuple[Action, ...]
    microbatches: int
    outputs: bool  # step(return_outputs=True): the last stage keeps every micro-batch's output and joins them
    scale: bool  # gradients are divided by the number of micro-batches
    gloo: bool  # the step runs on the CPU over gloo


Names = tuple[dict[str, str], dict[str, str]]  # of values and of storages: the whole program's -> the rank's


@dataclass(slots=True)
class Assembly:
    """What has been put together so far. `origins`: for each operator, the position of its origin in the whole program."""

    stages: Stages
    plan: Plan
    mine: dict[int, Stage]
    holding: Holding = field(default_factory=Holding)
    storages: dict[str, Storage] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    phases: list[tuple[str, list[Op]]] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    named: set[str] = field(default_factory=set)  # values that are made
    names: dict[tuple[int, int], Names] = field(default_factory=dict)  # by stage and micro-batch
    gradients: dict[str, Value] = field(default_factory=dict)  # a gradient's storage -> the tensor that it is
    outputs: list[Value] = field(default_factory=list)  # of the last stage
    carried: list[str] = field(default_factory=list)  # storages that the next step lets go as it begins

    def numbered(self, stage: int, micro: int, name: str) -> str:
        """The name of what a micro-batch has for itself."""
        return f"stage{stage}/micro{micro}/{name}" if len(self.mine) > 1 else f"micro{micro}/{name}"

    def names_of(self, stage: int, micro: int) -> Names:
        """The names of a micro-batch's values and storages, to be read and added to."""
        return self.names.setdefault((stage, micro), ({}, {}))

    def begin(self, phase: str) -> None:
        """The following operators are in this phase."""
        self.phases.append((phase, []))

    def emit(self, op: Op, origin: int) -> None:
        """One more operator."""
        self.named |= {r.name for r in op.results}
        self.phases[-1][1].append(op)
        self.origins.append(origin)

    def emit_first(self, op: Op) -> None:
        """An operator in front of all others."""
        self.phases[0][1].insert(0, op)
        self.origins.insert(0, 0)

    def pass_on(self, stage: int, micro: int, tensor: Sequence[Value], value: str, storage: str) -> None:
        """A tensor becomes the buffer of another stage of this rank, where it stays until the next step's takes its place."""
        values, storages = self.names_of(stage, micro)
        values |= {v.name: value for v in tensor}
        storages[tensor[0].storage] = storage
        self.storages[storage] = replace(self.storages[storage], kind=Kind.ACTIVATION, live_out=True)
        before = f"{storage}/before"
        self.storages[before] = replace(self.storages[storage], name=before, live_in=True, live_out=False)
        self.emit(Op("memir.free", frees=(before,), source="set_local_fwd_input"), self.origins[-1])

    def settle(self) -> None:
        """What nobody holds any more dies after the last operator."""
        dead = self.holding.reap()
        if dead:
            ops = self.phases[-1][1]
            ops[-1] = replace(ops[-1], frees=(*ops[-1].frees, *dead))

    def lives_in(self, storage: str) -> bool:
        """Whether it is there before the step."""
        declared = self.storages.get(storage)
        return declared is not None and declared.live_in
