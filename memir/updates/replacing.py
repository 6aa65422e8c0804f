"""A program with another optimizer step: its own one taken out, what is on a tape put in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Phase, Program, Repeat
from memir.ir.names import split
from memir.updates.layers import Layers
from memir.updates.parameters import Trained, flat_ops, parts_of
from memir.updates.tape import Member, Tape

PHASE = "optimizer"


def own_step(program: Program) -> list[Op | Repeat]:
    """The operators of the program's own optimizer."""
    return next((parts_of(program, phase.ops)[1] for phase in program.phases if phase.name == PHASE), [])


def with_step(program: Program, tape: Tape, members: Sequence[Member], trained: Trained, gone: Collection[str] = ()) -> Program:
    """The program with what is on the tape. `gone`: storages that die in it, which would have died later.

    InconclusiveError where one of those is kept for the next step.
    """
    layers = Layers(tape, members, trained.turns)
    before, step, after = _parts(program)
    made = {split(r.storage)[0] for op in flat_ops(step) for r in op.results}
    states = {split(s.name)[0] for s in program.storages if s.kind == Kind.OPTIMIZER_STATE}
    kept_alive = {split(s.name)[0] for s in program.storages if s.live_in and s.kind != Kind.OPTIMIZER_STATE}
    out = (made - kept_alive) | states
    out -= {split(s.name)[0] for s in program.storages if s.kind == Kind.GRADIENT}
    dying = tuple(f for op in flat_ops(step) for f in op.frees if split(f)[0] not in out)
    gone = {split(name)[0] for name in gone}
    for storage in program.storages:
        if split(storage.name)[0] in gone and storage.live_out:
            raise InconclusiveError("gradients that live on into the next step are not copied", where=f"${storage.name}")
    new: list[Op | Repeat] = layers.ops()
    new += [Op("memir.free", frees=dying)] if dying else []
    rest = [_without(item, gone) for item in after]
    phase = Phase(PHASE, (*before, *new, *(item for item in rest if item is not None)))
    phases = [phase if p.name == PHASE else p for p in program.phases]
    if all(p.name != PHASE for p in phases) and phase.ops:
        phases.append(phase)
    stay = [s for s in program.storages if split(s.name)[0] not in out]
    at = next((k for k, s in enumerate(program.storages) if s.kind == Kind.OPTIMIZER_STATE), None)
    at = len([s for s in stay if s.live_in]) if at is None else at
    storages = layers.storages()
    resident, temporary = [s for s in storages if s.live_in], [s for s in storages if not s.live_in]
    values = [v for v in program.values if split(v.storage)[0] not in out]
    return replace(
        program,
        storages=(*stay[:at], *resident, *stay[at:], *temporary),
        values=(*values, *layers.values()),
        phases=tuple(phases),
    )


def _parts(program: Program) -> tuple[list[Op | Repeat], list[Op | Repeat], list[Op | Repeat]]:
    return next((parts_of(program, phase.ops) for phase in program.phases if phase.name == PHASE), ([], [], []))


def _without(item: Op | Repeat, gone: Collection[str]) -> Op | Repeat | None:
    """An event without what died before; None where nothing is left."""
    if not isinstance(item, Op):
        return item
    frees = tuple(name for name in item.frees if split(name)[0] not in gone)
    return replace(item, frees=frees) if frees or item.drops or item.results or item.opcode != "memir.free" else None
