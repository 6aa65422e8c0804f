"""A program as requests to an allocator: what is allocated, in which order, before the first step and by each operator.

The first step of a run differs from the ones after it, and it is what the layout of memory begins with:

- Before it there are the model and the batch: parameters and buffers one by one as the modules have them, then inputs.
- The optimizer makes its state when it first steps (`_init_group` in torch/optim): all at once, parameter by parameter.
- What else is alive between steps (gradients that are kept, outputs of the step before) is not there yet.

An operator allocates its results in order, then its workspace, which it gives back when it is done, and then storages die: the
rules of docs/memory-model.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.liveness import walk
from memir.errors import UsageError
from memir.ir.core import Kind, Op, Phase, Program, Storage
from memir.ir.names import full_name
from memir.ir.unroll import unroll

MODEL = (Kind.PARAMETER, Kind.BUFFER)
PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear", "aten.matmul", "aten._scaled_mm"})


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a library takes from the allocator once and keeps, such as a cuBLAS workspace.

    It takes them in the first step, at the first matrix product of the first phase that ends in `phase`: each thread has a
    cuBLAS handle, the main one in forward and autograd's in backward (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    nbytes: int
    phase: str


@dataclass(frozen=True, slots=True)
class Move:
    """One operator of the flat program: what it asks for. Storages by name, `scratch` in bytes."""

    phase: str
    op: Op
    first: tuple[str, ...]  # in the first step of a run, before it: what lives on from there and no operator makes
    allocates: tuple[str, ...]
    scratch: int
    frees: tuple[str, ...]
    kept: tuple[int, ...] = ()  # in the first step, after its results: what libraries take and keep, bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step as requests, at one point of the program's domain."""

    program: Program  # flat, all sizes numbers
    storages: Mapping[str, Storage]
    sizes: Mapping[str, int]  # bytes of each storage
    before: tuple[str, ...]  # alive before the first step, in order
    moves: tuple[Move, ...]
    heirs: Mapping[str, str]  # made in a step and alive after it -> the name under which the next step knows it


def schedule(program: Program, env: Mapping[str, int], kept: Sequence[Kept] = ()) -> Schedule:
    """The requests of one step for these values of the program's dims; storages of the host are none of them.

    `kept` is what libraries take besides, in the first step of a run.
    UsageError for a dim without a value or a point outside of the domain; VerifyError as `memir.analysis.liveness.walk`.
    """
    missing = [dim for dim in program.dims if dim not in env]
    if missing:
        raise UsageError(f"no value is given for {', '.join(missing)}", hint="every request has to be a number of bytes")
    flat = unroll(program, env)
    storages = {s.name: s for s in flat.storages if s.device == "gpu"}
    ranks = _ranks(storages.values())
    before = [s for kinds in (MODEL, (Kind.INPUT,)) for s in storages.values() if s.live_in and s.kind in kinds]
    before.sort(key=lambda s: (s.kind is Kind.INPUT, s.kind is Kind.BUFFER, ranks.get(s.name, ())))
    steps = walk(flat)
    first = _first_uses(flat, storages)
    owners = {name: ranks[s.of or name] for name, s in storages.items() if (s.of or name) in ranks}
    taken = _taken(flat, kept)
    of = {v.name: v.storage for v in flat.values}
    moves = []
    for number, step in enumerate(steps):
        allocates = _in_order(step.op, step.allocates, of, owners)
        of.update((v.name, v.storage) for v in step.op.results)
        late = tuple(sorted(first.get(number, ()), key=lambda name: owners.get(name, ())))
        moves.append(
            Move(step.phase.name, step.op, late, allocates, step.op.scratch.constant, step.frees, tuple(taken.get(number, ())))
        )
    return Schedule(
        flat,
        storages,
        {name: s.nbytes.constant for name, s in storages.items()},
        tuple(s.name for s in before),
        tuple(moves),
        _heirs(storages.values()),
    )


Rank = tuple[int, ...]


def _ranks(storages: Collection[Storage]) -> dict[str, Rank]:
    """The place of each parameter and buffer in the tree of modules: `h.*.ln.weight[3]` is `ln.weight` of module `h.3`.

    A folded program declares all layers' members of one parameter in a row, the model has them layer by layer.
    """
    children: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    ranks: dict[str, Rank] = {}
    for storage in storages:
        if storage.kind not in MODEL:
            continue
        parts = tuple(full_name(storage.name).split("."))
        rank = []
        for depth, part in enumerate(parts):
            known = children[parts[:depth]]
            rank.append(int(part) if part.isdigit() else known.setdefault(part, len(known)))
        ranks[storage.name] = tuple(rank)
    return ranks


def _first_uses(flat: Program, storages: Mapping[str, Storage]) -> dict[int, list[str]]:
    """Where a first step makes what lives on, is not the model's nor the batch's, and is made by no operator.

    The optimizer's state before the first operator of the phase that uses some of it, or, if there are such, before the first
    there whose code lies in torch/optim; other storages before their first use.
    """
    waiting = {
        name for name, s in storages.items() if s.live_in and s.live_out and s.kind not in MODEL and s.kind is not Kind.INPUT
    }
    states = {name for name in waiting if storages[name].kind is Kind.OPTIMIZER_STATE}
    of = {v.name: v.storage for v in flat.values}
    found: dict[int, list[str]] = defaultdict(list)
    start, current = 0, ""
    for number, (phase, op) in enumerate(flat.ops()):
        if phase.name != current:
            start, current = number, phase.name
        of.update((v.name, v.storage) for v in op.results)
        used = {of[name] for name in op.operands} | {v.storage for v in op.results}
        if used & states:
            place = _optimizer_start(phase, start)
            found[place] += [name for name in storages if name in states]
            waiting -= states
            states = set()
        other = used & waiting
        if other:
            found[number] += [name for name in storages if name in other]
            waiting -= other
        if not waiting:
            break
    return found


def _taken(flat: Program, kept: Sequence[Kept]) -> dict[int, list[int]]:
    """Where each of `kept` is taken: the operator's number -> bytes. What no phase takes is taken nowhere."""
    found: dict[int, list[int]] = defaultdict(list)
    for one in kept:
        within = [n for n, (phase, op) in enumerate(flat.ops()) if phase.name.endswith(one.phase) and op.opcode in PRODUCTS]
        if within:
            found[within[0]].append(one.nbytes)
    return found


def _optimizer_start(phase: Phase, start: int) -> int:
    for place, op in enumerate(phase.ops):
        assert isinstance(op, Op)
        if op.source.startswith("torch/optim/"):
            return start + place
    return start


def _in_order(op: Op, allocates: tuple[str, ...], of: Mapping[str, str], owners: dict[str, Rank]) -> tuple[str, ...]:
    """The storages in the order that the operator allocates them in.

    The lists of a foreach operator go parameter by parameter, so a result belongs to the parameter that the operand in its
    place belongs to; a folded program has both in another order. `owners` learns the results'.
    """
    if len(allocates) < 2 or not op.opcode.startswith("aten._foreach_") or len(op.operands) < len(op.results):
        return allocates
    for operand, result in zip(op.operands, op.results, strict=False):
        owner = owners.get(of.get(operand, ""))
        if owner is not None:
            owners.setdefault(result.storage, owner)
    if any(name not in owners for name in allocates):
        return allocates
    return tuple(sorted(allocates, key=owners.__getitem__))


def _heirs(storages: Collection[Storage]) -> dict[str, str]:
    """What a step leaves for the next one under another name: kept gradients, kept outputs.

    Both are matched by kind, size and owner, in declared order.
    """
    dying: dict[object, deque[str]] = defaultdict(deque)
    made: list[Storage] = []
    for storage in storages:
        if storage.live_in and not storage.live_out:
            dying[storage.kind, storage.nbytes, storage.of].append(storage.name)
        elif storage.live_out and not storage.live_in:
            made.append(storage)
    found = {}
    for storage in made:
        waiting = dying[storage.kind, storage.nbytes, storage.of]
        if waiting:
            found[storage.name] = waiting.popleft()
    return found
