"""What ZeRO-3 fetches, prefetches and lets go of at each module: DeepSpeed's coordinator, with its trace complete.

deepspeed/runtime/zero/partitioned_param_coordinator.py: `fetch_sub_module`, `release_sub_module`, `__params_to_release`. The
order of modules is known from the step before; parameters that come up next are gathered ahead, as many elements as
`prefetch_bucket_size` says, unless `max_live_parameters` would be passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memir.parallel.module_calls import Call


@dataclass(frozen=True, slots=True)
class Limits:
    """DeepSpeed's options of these names, in elements."""

    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int


@dataclass(slots=True)
class Coordinator:
    """Which parameters are whole. `numel`: elements of each; `persistent` ones are never let go of between modules."""

    calls: Sequence[Call]  # of one forward and backward
    numel: Mapping[str, int]
    persistent: frozenset[str]
    limits: Limits
    step: int = 0
    whole: set[str] = field(default_factory=set)
    flying: set[str] = field(default_factory=set)
    active: dict[str, set[str]] = field(default_factory=dict)
    queue: deque[tuple[str, int]] = field(default_factory=deque)
    fetched_for: dict[str, int] = field(default_factory=dict)
    available: int = 0

    def __post_init__(self) -> None:
        self.whole = set(self.persistent)

    def begin(self, calls: Sequence[Call]) -> list[str]:
        """Another forward and backward, with its calls (`reset_step`): parameters that are still whole stay so. Those on
        their way are let go of, which is what is returned."""
        self.calls, self.step, self.available = calls, 0, 0
        self.queue = deque((name, step) for step, call in enumerate(calls) for name in call.parameters)
        self.fetched_for = {}
        gone = sorted(self.flying)
        self.flying = set()
        return gone

    def fetch(self, call: Call) -> tuple[list[str], list[str]]:
        """(gathered now, gathered ahead): two collectives, either may be empty."""
        now = [name for name in call.parameters if name not in self.whole and name not in self.flying]
        self.available += sum(self.numel[name] for name in now)
        for name in call.parameters:
            self.active.setdefault(name, set()).add(call.path)
            self.flying.discard(name)
            self.whole.add(name)
        self._discard(call)
        ahead = self._ahead()
        self.flying |= set(ahead)
        self.available += sum(self.numel[name] for name in ahead)
        self.step += 1
        return now, ahead

    def _discard(self, call: Call) -> None:
        wanted = {name for name in call.parameters if self.fetched_for.get(name, -1) < self.step}
        found: set[str] = set()
        while self.queue and len(found) < len(wanted):
            name, step = self.queue.popleft()
            self.fetched_for[name] = step
            found.add(name)

    def _ahead(self) -> list[str]:
        room = min(self.limits.max_live_parameters - self.available, self.limits.prefetch_bucket_size)
        found: list[str] = []
        total = 0
        while self.queue and total < room and self.limits.prefetch_bucket_size > 0:
            name, step = self.queue.popleft()
            self.fetched_for[name] = max(self.fetched_for.get(name, -1), step)
            if name not in self.whole and name not in self.flying and name not in found:
                found.append(name)
                total += self.numel[name]
        return found

    def release(self, call: Call) -> list[str]:
        """Parameters that are let go of after the call."""
        going = {
            name for name in call.parameters if name not in self.persistent and self.fetched_for.get(name, -1) <= self.step
        }
        passed = 0
        for later in self.calls[self.step :]:
            if passed >= self.limits.max_reuse_distance:
                break
            going -= set(later.parameters)
            passed += sum(self.numel[name] for name in later.parameters)
        for name in call.parameters:
            self.active.get(name, set()).discard(call.path)
        return self._let_go([name for name in call.parameters if name in going])

    def leftovers(self) -> list[str]:
        """What is still whole at the end of a backward because no module let go of it."""
        for paths in self.active.values():
            paths.clear()
        return self._let_go(sorted(self.whole - self.persistent))

    def _let_go(self, names: Sequence[str]) -> list[str]:
        gone = [name for name in names if name in self.whole and not self.active.get(name)]
        self.whole -= set(gone)
        self.available -= sum(self.numel[name] for name in gone)
        return gone
