"""What is alive at one point of a program: which storages, in which groups, held by what, and how an allocator rounds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.liveness import LiveRange, Timeline
from memir.ir.core import Program

Rounding = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Group:
    """Storages of one kind made by one operator at one source line, layers taken together."""

    nbytes: int
    count: int
    kind: str
    op: str  # the operator that allocates them; empty where they are alive before the step
    module: str  # module path with layer numbers as *; where `op` is empty the parameter's name
    source: str
    held_by: str = ""  # for what is never used again: what keeps it


def alive_at(program: Program, line: Timeline, index: int) -> list[str]:
    """The names of the storages alive while operator `index` runs (START: before the first), oldest first."""
    alive = dict.fromkeys(s.name for s in program.storages if s.live_in and s.device == "gpu")
    for position in range(index + 1):
        step = line.steps[position]
        alive.update(dict.fromkeys(step.allocates))
        if position < index:
            for name in step.frees:
                del alive[name]
    return list(alive)


Key = tuple[str, str, str, str, str]  # kind, operator, module, source, holder


def grouped(
    line: Timeline, alive: Iterable[LiveRange], nbytes: Mapping[str, int], holder: Callable[[LiveRange], str]
) -> dict[Key, tuple[int, int]]:
    """Bytes and number of storages by kind, operator, module without layer numbers, source line and `holder`; `nbytes` gives
    each one's bytes."""
    total: dict[Key, tuple[int, int]] = {}
    for live in alive:
        storage = live.storage
        if live.made is None:
            key = (str(storage.kind), "", collapse(storage.of or storage.name), "", holder(live))
        else:
            op = line.steps[live.made].op
            key = (str(storage.kind), op.opcode, collapse(op.path), op.source, holder(live))
        size, count = total.get(key, (0, 0))
        total[key] = (size + nbytes[storage.name], count + 1)
    return total


def order(group: Group) -> tuple[int, str, str, str, str, str]:
    """The order groups are listed in: the largest first, then by name."""
    return (-group.nbytes, group.kind, group.module, group.op, group.source, group.held_by)


def is_unused(live: LiveRange, index: int) -> bool:
    """Alive at `index` without a use there or later. Resident storages are used in the next step, and do not count."""
    resident = live.storage.live_in and live.storage.live_out
    return not resident and live.storage.nbytes.terms != () and (live.last_use is None or live.last_use < index)


def held_by(live: LiveRange, index: int) -> str:
    """What keeps a storage alive at operator `index` after its last use, as far as the program tells.

    A `drops` entry at or before it: Python let go and autograd still holds it. Otherwise a Python variable does; where the
    storage is also saved and no drop is known, either may. What was alive before the step and dies in it is held by the loop.
    """
    if live.storage.live_out:
        return "kept for the next step"
    if live.dropped is not None and live.dropped <= index:
        return "autograd"
    if live.storage.live_in:
        return "a Python variable, from the step before"
    return "a Python variable or autograd" if live.saved is not None and live.dropped is None else "a Python variable"


def collapse(path: str) -> str:
    """A module path, or a parameter's name, with the numbers of layers and experts as *: `layers.*.mlp.up_proj`."""
    return re.sub(r"(?<![^.])(\d+|\d*\*(\+\d+)?)(?![^.])", "*", path.partition("[")[0])


def round_size(nbytes: int) -> int:
    """What CUDA's caching allocator allocates for a request: a multiple of 512 bytes, nothing for nothing.

    `round_size` with kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp, without the optional roundup_power2_divisions.
    """
    return -(-nbytes // 512) * 512


def rounded(nbytes: int, rounding: Rounding | None) -> int:
    """Bytes as an allocator with this rounding gives them; None does not round."""
    return nbytes if rounding is None else rounding(nbytes)


def rounded_peak(
    line: Timeline,
    nbytes: Mapping[str, int],
    steady: Sequence[str],
    env: Mapping[str, int],
    rounding: Rounding | None,
) -> int:
    """The largest sum of rounded storages (and scratch) at any point; `steady` names those alive before the first operator."""
    return max(rounded_points(line, nbytes, steady, env, rounding))


def rounded_points(
    line: Timeline,
    nbytes: Mapping[str, int],
    steady: Sequence[str],
    env: Mapping[str, int],
    rounding: Rounding | None,
) -> list[int]:
    """The sum of rounded storages (and scratch) before the first operator, and while each operator of a flat program runs."""
    sizes = {name: rounded(number, rounding) for name, number in nbytes.items()}
    live = sum(sizes[name] for name in steady)
    points = [live]
    for step in line.steps:
        for name in step.allocates:
            live += sizes[name]
        points.append(live + (rounded(step.op.scratch.evaluate(env), rounding) if step.op.scratch.terms else 0))
        for name in step.frees:
            live -= sizes[name]
    return points
