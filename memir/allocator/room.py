"""Whether a program's steps fit into a GPU: played through the allocator without a limit, and with one where that decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memir.allocator.replay import Simulation, simulate
from memir.allocator.schedule import Kept
from memir.allocator.settings import Settings
from memir.ir.core import Program


@dataclass(frozen=True, slots=True)
class Room:
    """`reserved` is what the allocator would like to hold, bytes; `answer` "fits", "tight" or "does not fit".

    It is tight where it runs with the least that the CUDA context may take, and not with the most. `failure` says where memory
    runs out (with the least, where it does not fit) and what PyTorch would print.
    """

    reserved: int
    answer: str
    failure: str


def room(
    program: Program,
    env: Mapping[str, int],
    capacity: int,
    context: tuple[int, int],
    kept: Sequence[Kept] = (),
    settings: Settings | None = None,
) -> Room:
    """The verdict at `env` for `capacity` bytes of which the context takes from `context[0]` to `context[1]`.

    More reserved bytes than there are do not matter by themselves: PyTorch gives cached blocks back before it gives up
    (c10/cuda/CUDACachingAllocator.cpp, `malloc`), which is played too.
    """

    def limited(context: int) -> Simulation:
        return simulate(program, env, settings, max(0, capacity - context), total=capacity, kept=kept)

    reserved = simulate(program, env, settings, kept=kept).reserved_peak
    if reserved + context[1] <= capacity:
        return Room(reserved, "fits", "")
    least, most = map(limited, context)
    if least.failure is not None:
        return Room(reserved, "does not fit", _told(least))
    if most.failure is not None:
        return Room(reserved, "tight", _told(most))
    return Room(reserved, "fits", "")


def _told(result: Simulation) -> str:
    """`in backward at aten.mm (model.py:30): CUDA out of memory. Tried to allocate ...`."""
    failure = result.failure
    assert failure is not None
    place = failure.place
    where = (
        f"in {place.phase}" + (f" at {place.opcode}" if place.opcode else "") + (f" ({place.source})" if place.source else "")
    )
    return f"{where}: {failure.oom.message}"
