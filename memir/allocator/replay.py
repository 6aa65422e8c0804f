"""A program's steps played through the allocator: what a GPU would report as reserved, and what it is fragmented by.

simulate(program, {"B": 4, "S": 1024, "L": 12}, parse_settings("expandable_segments:True")).reserved_peak
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memir.allocator.player import Failure, Hole, PhasePeak, Place, Player
from memir.allocator.schedule import Kept, Schedule, schedule
from memir.allocator.settings import Settings
from memir.allocator.simulator import Allocator
from memir.errors import UsageError
from memir.ir.core import Program

STEPS = 3  # the first makes the optimizer's state, the second meets it for the first time, the third mostly repeats the second
NUM_HOLES = 8


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the allocator would report after some steps, in bytes; after a failure what it reported until then."""

    steps: int
    settings: Settings
    capacity: int | None
    rounded_peak: int  # each request rounded up (to 512 bytes unless the settings say otherwise)
    allocated_peak: int  # its blocks, whose rest is not always split off: torch.cuda.max_memory_allocated
    reserved_peak: int  # torch.cuda.max_memory_reserved
    allocated_end: int
    reserved_end: int
    at_peak: Place  # the operator with the most allocated while the most is reserved
    allocated_at_peak: int  # allocated right then: what is reserved besides is of no use to it
    holes: tuple[Hole, ...]  # the largest free blocks right then, from the largest
    phases: tuple[PhasePeak, ...]
    num_retries: int  # how often all cached memory was given back to go on
    failure: Failure | None

    @property
    def fragmentation(self) -> int:
        """Bytes that are reserved and not allocated at `at_peak`."""
        return self.reserved_peak - self.allocated_at_peak


def simulate(
    program: Program,
    env: Mapping[str, int],
    settings: Settings | None = None,
    capacity: int | None = None,
    steps: int = STEPS,
    *,
    total: int | None = None,
    kept: Sequence[Kept] = (),
    load: Callable[[Schedule, Allocator], Mapping[str, int]] | None = None,
) -> Simulation:
    """Play `steps` steps of the program at `env`, which has a number for each of its dims.

    `capacity` is the memory in bytes that there is for the allocator, `total` what the driver reports, for the message; `kept`
    what libraries take from the allocator once and keep; `load` puts the model there (`memir.allocator.loading`), otherwise its
    storages are allocated one by one. Layers are unrolled. UsageError: a dim without a value, a point
    outside of the domain, no step; InconclusiveError: a backend that is not simulated; VerifyError: a program that allocates or
    frees twice.
    """
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be played")
    plan = schedule(program, env, kept)

    def player() -> Player:
        allocator = Allocator(settings, capacity, total=total, record=False)
        return Player(plan, allocator, load(plan, allocator) if load is not None else None)

    played = player()
    failure = played.play(steps)
    # the layout at the peak is found by playing again until then
    again = player()
    again.play(steps, until=played.fullest)
    allocator = played.allocator
    return Simulation(
        steps=steps,
        settings=allocator.settings,
        capacity=capacity,
        rounded_peak=played.rounded_peak,
        allocated_peak=max(played.allocated_peak, allocator.peak_allocated),
        reserved_peak=max(played.reserved_peak, allocator.peak_reserved),
        allocated_end=allocator.allocated,
        reserved_end=allocator.reserved,
        at_peak=again.place(),
        allocated_at_peak=again.allocator.allocated,
        holes=again.holes(NUM_HOLES),
        phases=tuple(played.phases),
        num_retries=allocator.num_retries,
        failure=failure,
    )
