"""From a recording to a `Program`: kinds, origins of backward operators, what autograd saves and when Python lets go of it."""

from __future__ import annotations

from collections import defaultdict

from memir.frontend.align import drops_of, forward_events
from memir.frontend.record import Event, Recorder
from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.opset import scratch_of
from memir.recipe import Recipe


def lower(recorder: Recorder, released: Recorder | None, name: str, domain: tuple[str, ...], recipe: Recipe) -> Program:
    """The recorded step as a Program. `released` is the forward without gradients, from which drops are read."""
    _Links(recorder).resolve()
    touched = {v.storage for v in recorder.values} | set(recorder.resident) | {s for e in recorder.events for s in e.frees}
    _classify(recorder, touched)
    names = _storage_names(recorder)
    value_names = _value_names(recorder, names)
    drops = drops_of(recorder, released) if released is not None else {}
    saves = _saves(recorder)
    first_result = {i: e.results[0] for i, e in enumerate(recorder.events) if e.results}

    values = [
        Value(value_names[i], v.dtype, v.shape, v.strides, v.offset, names[v.storage]) for i, v in enumerate(recorder.values)
    ]
    used = set(recorder.inputs)
    phases: list[tuple[str, list[Op]]] = []
    for number, event in enumerate(recorder.events):
        if event.opcode.startswith("memir.") and not event.frees and not event.results and number not in drops:
            continue
        operands = tuple(values[o] for o in event.operands)
        results = tuple(values[r] for r in event.results)
        forward = event.forward_of
        op = Op(
            opcode=event.opcode if event.opcode in ("memir.alloc", "memir.free") else _opcode(event.opcode),
            operands=tuple(v.name for v in operands),
            results=results,
            frees=tuple(names[s] for s in event.frees),
            drops=tuple(names[s] for s in drops.get(number, ())),
            saves=tuple(names[s] for s in sorted(saves.get(number, ()))),
            scratch=scratch_of(recipe.target, _opcode(event.opcode), operands, results),
            path=event.path,
            source=event.source,
            forward_of=value_names[first_result[forward]] if forward is not None and forward in first_result else None,
        )
        if not phases or phases[-1][0] != event.phase:
            phases.append((event.phase, []))
        phases[-1][1].append(op)

    storages = tuple(
        Storage(
            names[i], s.nbytes, Kind(s.kind), s.device, names_of_owner(s.of, names, recorder), s.born is None, s.died is None
        )
        for i, s in enumerate(recorder.storages)
        if i in touched
    )
    dims = tuple(sorted({symbol for s in storages for symbol in s.nbytes.symbols()} | {"B", "S"}))
    return Program(
        name=name,
        dims=dims,
        domain=domain,
        mesh=(),
        storages=storages,
        values=tuple(values[i] for i in sorted(used)),
        phases=tuple(Phase(phase, tuple(ops)) for phase, ops in phases),
    )


def names_of_owner(owner: str | None, names: dict[int, str], recorder: Recorder) -> str | None:
    """The storage's name of the parameter called `owner`."""
    if owner is None:
        return None
    for index in recorder.resident:
        if recorder.storages[index].name == owner and recorder.storages[index].kind == Kind.PARAMETER:
            return names[index]
    return None


class _Links:
    """Ties each backward or recomputed event to its forward event; gives it that one's path and line."""

    def __init__(self, recorder: Recorder) -> None:
        self.events = recorder.events

    def resolve(self) -> None:
        by_sequence: dict[int, int] = {}
        occurrences: dict[tuple[str, str], list[int]] = defaultdict(list)
        recomputed: dict[tuple[str, str], int] = defaultdict(int)
        for number, event in enumerate(self.events):
            if not event.backward and event.phase.endswith("forward"):
                occurrences[event.path, event.opcode].append(number)
                if event.sequence is not None:
                    by_sequence.setdefault(event.sequence, number)
            elif event.recompute:
                made = occurrences[event.path, event.opcode]
                turn = recomputed[event.path, event.opcode]
                recomputed[event.path, event.opcode] += 1
                event.forward_of = made[turn % len(made)] if made else None
        last: Event | None = None
        for event in self.events:
            if not event.backward or event.recompute:
                continue
            if event.sequence is not None and event.sequence in by_sequence:
                event.forward_of = by_sequence[event.sequence]
                origin: Event | None = self.events[event.forward_of]
            else:
                origin = last  # the engine's own work between nodes: accumulating gradients
            if origin is not None:
                event.path, event.source = origin.path, origin.source
            last = event


def _classify(recorder: Recorder, touched: set[int]) -> None:
    """Kinds for what has no owner: held across steps or saved for backward is an activation, the rest is temporary."""
    ends: dict[str, int] = {}
    for number, event in enumerate(recorder.events):
        ends[event.phase] = number
    for record in (recorder.storages[index] for index in touched):
        if record.kind:
            continue
        if record.born is None or record.died is None:
            record.kind = Kind.ACTIVATION
            continue
        birth = recorder.events[record.born]
        death = recorder.events[record.died]
        outlives_forward = birth.phase.endswith("forward") and death.phase != birth.phase
        outlives_recompute = birth.recompute and not death.recompute
        record.kind = Kind.ACTIVATION if outlives_forward or outlives_recompute else Kind.TEMPORARY


def _storage_names(recorder: Recorder) -> dict[int, str]:
    names: dict[int, str] = {}
    taken: set[str] = set()
    for index, record in enumerate(recorder.storages):
        name = record.name or f"storage_{index}"
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}.{count}"
        taken.add(unique)
        names[index] = unique
    return names


def _value_names(recorder: Recorder, storages: dict[int, str]) -> list[str]:
    names: list[str] = []
    taken: set[str] = set()
    inputs = set(recorder.inputs)
    for index, value in enumerate(recorder.values):
        name = storages[value.storage] if index in inputs else value.name
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}.v{count}"
        taken.add(unique)
        names.append(unique)
    return names


def _saves(recorder: Recorder) -> dict[int, set[int]]:
    """Storages that autograd keeps because of an operator: those that its graph held after the forward, and those that the
    operator's backward reads (for a checkpointed layer: on the recomputed operator, and what the layer was called with on the
    first of its operators)."""
    saves: dict[int, set[int]] = defaultdict(set)
    recomputed: dict[int, int] = {}
    by_sequence: dict[int, int] = {}
    for number, event in enumerate(recorder.events):
        saves[number].update(event.keeps)
        if event.recompute and event.forward_of is not None:
            recomputed[event.forward_of] = number
        elif not event.backward and event.sequence is not None:
            by_sequence.setdefault(event.sequence, number)
        if not event.backward or event.recompute or event.forward_of is None:
            continue
        for operand in event.operands:
            storage = recorder.values[operand].storage
            born = recorder.storages[storage].born
            birth = recorder.events[born] if born is not None else None
            if birth is None or birth.phase.endswith("forward"):
                saves[event.forward_of].add(storage)
            elif birth.recompute and event.forward_of in recomputed:
                saves[recomputed[event.forward_of]].add(storage)
    for sequence, held in recorder.saved.items():
        if sequence in by_sequence:
            saves[by_sequence[sequence]] |= held
    return saves


__all__ = ["forward_events", "lower"]


def _opcode(name: str) -> str:
    """The operator that memir's own one stands for: `memir._fused_rms_norm` is aten's, `memir_x.y` is x's."""
    return name.removeprefix("memir_") if name.startswith("memir_") else name.replace("memir.", "aten.", 1)
