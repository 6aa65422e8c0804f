"""The step of one pipeline rank: its stages' operators once for each micro-batch, in the schedule's order.

Gradients are added up over the micro-batches (torch/csrc/autograd/functions/accumulate_grad.h, `accumulateGrad`): the first one
stays, a later one is added to it and dies. The engine adds into a gradient only if nobody else holds it (input_buffer.cpp,
`can_accumulate_inplace`), and the received one is in its buffer: the first sum with it is a new tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.layout import contiguous
from memir.ir.size import ZERO
from memir.parallel.assembly import Assembly, Plan
from memir.parallel.finish import append_optimizer, finish
from memir.parallel.holding import RUNNING, Holding
from memir.parallel.last_stage import end_of_model, logits, loss_of
from memir.parallel.running import Run
from memir.parallel.split_backward import SplitBackward, split_backward
from memir.parallel.stages import Stage, Stages, rename, without_parameters
from memir.parallel.standing import RECEIVED_GRADIENT, declare
from memir.rewrite.flow import Flow, in_place

_ADD, _ADD_ = "aten.add.Tensor", "aten.add_.Tensor"
_RESIDENT = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE, Kind.GRADIENT)


def rank_step(stages: Stages, plan: Plan) -> tuple[Program, list[int]]:
    """The rank's program, and for each of its operators the position of its origin in the whole one.

    InconclusiveError where a stage has no backward, or what it passes on is not one tensor.
    """
    flow = stages.flow
    assembly = Assembly(stages, plan, {number: stages.stage(number) for number in plan.stages})
    parameters: frozenset[str] = frozenset().union(*(s.parameters for s in assembly.mine.values()))
    for number, part in assembly.mine.items():
        if not any(op.results for op in part.backward):
            message = f"pipeline-parallel: nothing is trained on stage {number}, and PyTorch's schedules run a backward on each"
            raise InconclusiveError(message, hint="fewer frozen layers, or other stages with  at=")
    declare(assembly, parameters)
    run = Run(_Rank(assembly, assembly.holding), plan.gloo)
    {"gpipe": run.gpipe, "1f1b": run.one_by_one}.get(plan.schedule, run.runtime)(plan.order)
    finish(assembly, run)
    everything = {s.name for s in flow.program.storages if s.kind == Kind.PARAMETER}
    append_optimizer(assembly, *without_parameters(flow, everything - parameters))
    program = replace(
        flow.program,
        storages=tuple(assembly.storages.values()),
        values=tuple(assembly.values),
        phases=tuple(Phase(name, tuple(ops)) for name, ops in assembly.phases),
    )
    return program, assembly.origins


def check_input(flow: Flow) -> None:
    """UsageError for a step that is no training step of one micro-batch, or that holds outputs."""
    phases = dict.fromkeys(flow.phase)
    if "forward" not in phases or "backward" not in phases:
        message = "pipeline-parallel: the program is not the training step of one micro-batch"
        hint = "trace it without accumulation: the pipeline has the micro-batches, microbatches=8"
        raise UsageError(message, where=f"phases {', '.join(phases)}", hint=hint)
    for storage in flow.program.storages:
        if storage.live_in and storage.kind not in _RESIDENT:
            message = (
                "pipeline-parallel: the program holds outputs from step to step, and a pipeline's schedule does that itself"
            )
            raise UsageError(message, where=f"${storage.name}", hint="trace it without keeping outputs")


@dataclass(slots=True)
class _Rank:
    """What a schedule runs (memir.parallel.running.Rank)."""

    assembly: Assembly
    holding: Holding
    splits: dict[int, SplitBackward] = field(default_factory=dict)
    templates: dict[int, dict[str, Storage]] = field(default_factory=dict)

    def is_last(self, stage: int) -> bool:
        """Whether it has head and loss."""
        return stage == self.assembly.stages.count - 1

    def settle(self) -> None:
        """What nobody holds any more dies here."""
        self.assembly.settle()

    def forward(self, stage: int, micro: int) -> tuple[str, ...]:
        """Runs a forward up to the stage's output; its storage."""
        assembly = self.assembly
        part = assembly.mine[stage]
        output = logits(self.assembly.stages, part) if self.is_last(stage) else part.leaves[0]
        assembly.begin(f"stage{stage}.micro{micro}.forward")
        values, storages = assembly.names_of(stage, micro)
        if stage - 1 not in assembly.mine:
            self._receive(part.enters, values, part.origins[0])
        end = end_of_model(self.assembly.stages, part) if self.is_last(stage) else len(part.forward)
        for op, origin in zip(part.forward[:end], part.origins[0][:end], strict=True):
            if op.opcode == "memir.free" and op.frees and all(map(assembly.lives_in, op.frees)):
                if micro == 0 and stage == assembly.plan.stages[0]:  # zero_grad, before the first forward
                    assembly.emit(op, origin)
                continue
            self._run(part, stage, micro, op, origin, {output.storage})
        made = storages[output.storage]
        if stage + 1 in assembly.mine:
            after = assembly.mine[stage + 1].enters
            assembly.pass_on(stage + 1, micro, after, values.get(output.name, output.name), made)
            self.holding.put(f"buffer {stage + 1} {micro}", (made,))
        else:
            self._send(part.leaves, values, part.origins[0])
        if self.is_last(stage):
            assembly.outputs.append(replace(output, name=values.get(output.name, output.name), storage=made))
            if assembly.plan.outputs:
                self.holding.append("output_chunks", (made,))
        return (made,)

    def loss(self, stage: int, micro: int) -> None:
        """Runs the loss on the last stage's output."""
        part = self.assembly.mine[stage]
        storages = self.assembly.names_of(stage, micro)[1]
        loss = loss_of(self.assembly.stages, part)
        end = end_of_model(self.assembly.stages, part)
        for op, origin in zip(part.forward[end:], part.origins[0][end:], strict=True):
            self._run(part, stage, micro, op, origin, set(loss))
        self.holding.append("losses", (storages[name] for name in loss))
        self.holding.put(RUNNING, ())

    def backward(self, stage: int, micro: int) -> tuple[str, ...]:
        """Runs a backward and adds up its gradients; the storage of the gradient that goes back."""
        assembly = self.assembly
        part = assembly.mine[stage]
        assembly.begin(f"stage{stage}.micro{micro}.backward")
        values, storages = assembly.names_of(stage, micro)
        self._receive(part.gradient, values, part.origins[1])
        received = part.gradient[0].storage if part.gradient else ""
        buffer = assembly.numbered(stage, micro, RECEIVED_GRADIENT)
        last = self._last_writes(part)
        for place, (op, origin) in enumerate(zip(part.backward, part.origins[1], strict=True)):
            writes = in_place(op.opcode) and any(r.storage == received for r in op.results)
            now = self._out_of_place(op, storages, received) if writes and storages.get(received) == buffer else op
            self._run(part, stage, micro, now, origin, {v.storage for v in part.returned})
            for name in last.get(place, ()):
                self._accumulate(name, now, assembly.names_of(stage, micro), origin)
        self._send(part.returned, values, part.origins[1])
        made = storages[part.returned[0].storage] if part.returned else ""
        return (made,) if self.holding.follows(made) else ()

    def backward_input(self, stage: int, micro: int) -> None:
        """Runs the backward of a stage's input; the gradient stays with the buffer until the next step."""
        assembly = self.assembly
        part = assembly.mine[stage]
        if not part.returned:
            return
        split = self._split(stage)
        assembly.begin(f"stage{stage}.micro{micro}.input.backward")
        values, storages = assembly.names_of(stage, micro)
        if stage + 1 not in assembly.mine:
            self._receive(part.gradient, values, part.origins[1])
        for op, origin in split.inputs:
            self._run(part, stage, micro, op, origin, set())
        if stage - 1 in assembly.mine:
            name = part.returned[0].name
            before = assembly.mine[stage - 1].gradient
            assembly.pass_on(stage - 1, micro, before, values.get(name, name), storages[split.returned])
            return
        assembly.carried.append(storages[split.returned])
        self._send(part.returned, values, part.origins[1])

    def backward_weight(self, stage: int, micro: int) -> None:
        """Runs the backward of a stage's parameters, group by group."""
        assembly = self.assembly
        part = assembly.mine[stage]
        if not part.returned:
            self.backward(stage, micro)
            return
        split = self._split(stage)
        assembly.begin(f"stage{stage}.micro{micro}.weight.backward")
        names = assembly.names_of(stage, micro)
        last: list[str] = []
        for group in split.groups:
            origin = group.ops[-1][1] if group.ops else part.origins[1][-1]
            self._run(part, stage, micro, Op("memir.free", frees=group.before), origin, set())
            for op, place in group.ops:
                self._run(part, stage, micro, op, place, set())
            self._run(part, stage, micro, Op("memir.free", frees=group.after), origin, set())
            self._free(last, origin)
            last = []
            for name in group.gradients:
                maker = next(op for op, _ in reversed(group.ops) if any(r.storage == name for r in op.results))
                last += self._accumulate(name, maker, names, origin, keeps=True)
        self._run(part, stage, micro, Op("memir.free", frees=split.end), part.origins[1][-1], set())
        self._free(last, part.origins[1][-1])

    def _free(self, storages: list[str], origin: int) -> None:
        if storages:
            self.assembly.emit(Op("memir.free", frees=tuple(storages)), origin)

    def _split(self, stage: int) -> SplitBackward:
        if stage not in self.splits:
            self.splits[stage] = split_backward(self.assembly.stages, self.assembly.mine[stage])
            self.templates.pop(stage, None)
        return self.splits[stage]

    # -- between ranks

    def _receive(self, tensor: tuple[Value, ...], values: dict[str, str], origins: tuple[int, ...]) -> None:
        """A message into the micro-batch's buffer."""
        if tensor:
            buffer = values[tensor[0].name]
            got = next(v for v in self.assembly.values if v.name == buffer)
            self.assembly.emit(Op("c10d.recv_", (buffer,), (replace(got, name=f"{buffer}/now"),)), origins[0])

    def _send(self, tensor: tuple[Value, ...], values: dict[str, str], origins: tuple[int, ...]) -> None:
        """A message to the neighbour; the tensor's holders are those of the schedule (memir.parallel.running)."""
        if tensor:
            name = values.get(tensor[0].name, tensor[0].name)
            self.assembly.emit(Op("c10d.send", (name,)), origins[-1])

    # -- one operator

    def _run(self, part: Stage, stage: int, micro: int, op: Op, origin: int, followed: set[str]) -> None:
        """The operator under the micro-batch's names; it frees what nobody else holds."""
        assembly, holding = self.assembly, self.holding
        values, storages = assembly.names_of(stage, micro)
        for value in op.results:
            if value.name in assembly.named or micro:
                values.setdefault(value.name, assembly.numbered(stage, micro, value.name))
            if value.storage not in storages and not assembly.lives_in(value.storage):
                self._born(part, stage, micro, value.storage, followed)
        new = rename(op, values, storages)
        frees = [n for n in new.frees if n in assembly.storages and not assembly.storages[n].live_out]
        for name in [n for n in frees if holding.follows(n)]:
            holding.disown(name)
            frees.remove(name)
        drops = [n for n in new.drops if n in assembly.storages and not assembly.lives_in(n) and not holding.follows(n)]
        new = replace(new, frees=(*frees, *holding.reap()), drops=tuple(drops))
        if new.opcode != "memir.free" or new.frees or new.drops:
            assembly.emit(new, origin)

    def _born(self, part: Stage, stage: int, micro: int, name: str, followed: set[str]) -> None:
        """A storage that the operator allocates is declared."""
        assembly = self.assembly
        storages = assembly.names_of(stage, micro)[1]
        template = self._templates(part)[name]
        own = assembly.numbered(stage, micro, name)
        if template.kind == Kind.GRADIENT and template.of in part.parameters:
            first = name not in assembly.gradients
            storages[name] = name if first else own
            assembly.storages[storages[name]] = template if first else _temporary(template, own)
            return
        storages[name] = name if not micro and name not in assembly.storages else own
        assembly.storages[storages[name]] = replace(template, name=storages[name], live_in=False, live_out=False)
        if name in followed:
            self.holding.follow(storages[name])
            self.holding.append(RUNNING, (storages[name],))

    def _templates(self, part: Stage) -> dict[str, Storage]:
        """The whole program's storages as the stage's operators have them, by name."""
        if part.number not in self.templates:
            split = self.splits[part.number].storages if part.number in self.splits else ()
            every = (*self.assembly.stages.flow.program.storages, *part.storages, *split)
            self.templates[part.number] = {s.name: s for s in every}
        return self.templates[part.number]

    def _out_of_place(self, op: Op, storages: dict[str, str], received: str) -> Op:
        if op.opcode != _ADD_:
            raise InconclusiveError(
                "pipeline-parallel: this operator writes into a gradient that was received", where=op.opcode
            )
        del storages[received]
        strides = contiguous(op.results[0].shape)
        return replace(op, opcode=_ADD, results=(replace(op.results[0], strides=strides, offset=ZERO),))

    def _accumulate(
        self, name: str, op: Op, names: tuple[dict[str, str], dict[str, str]], origin: int, *, keeps: bool = False
    ) -> list[str]:
        """The first micro-batch's gradient stays; a later one is added to it and dies, or with `keeps` is what is returned."""
        values, storages = names
        value = next(r for r in reversed(op.results) if r.storage == name)
        now = replace(value, name=values.get(value.name, value.name), storage=storages[name])
        before = self.assembly.gradients.setdefault(name, now)
        if before is now:
            return []
        total = replace(before, name=f"{now.name}/sum")
        frees = () if keeps else (now.storage,)
        self.assembly.emit(Op(_ADD_, (before.name, now.name), (total,), frees, path=op.path, source=op.source), origin)
        return [now.storage] if keeps else []

    def _last_writes(self, part: Stage) -> dict[int, list[str]]:
        """For each operator of backward after which gradients of parameters are whole: their storages."""
        own = {s.name for s in self.assembly.stages.flow.program.storages if s.kind == Kind.GRADIENT}
        whole = {r.storage: place for place, op in enumerate(part.backward) for r in op.results if r.storage in own}
        found: dict[int, list[str]] = {}
        for name, place in whole.items():
            found.setdefault(place, []).append(name)
        return found


def _temporary(gradient: Storage, name: str) -> Storage:
    return replace(gradient, name=name, kind=Kind.TEMPORARY, of=None, live_out=False)
