"""Who holds the tensors that stages exchange: the variables and lists of PyTorch's schedules, by reference count.

A storage that is followed dies when neither autograd and the model's own Python (`own`) nor any variable of the schedule has
it any more. Everything else dies where the stage's operators say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

RUNNING = "running"  # the slot of what a forward or backward has made and returns


@dataclass(slots=True)
class Holding:
    """References to followed storages. A slot is a variable (`output`), or a list's or dictionary's entry (`fwd_cache 0 3`)."""

    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    dead: list[str] = field(default_factory=list)  # without references since `reap`

    def follow(self, storage: str) -> None:
        """A new storage, which its stage's operators hold."""
        self.put(f"own {storage}", (storage,))

    def follows(self, storage: str) -> bool:
        """Whether it is followed and alive."""
        return self.counts[storage] > 0

    def disown(self, storage: str) -> None:
        """Its stage's operators hold it no more."""
        self.put(f"own {storage}", ())

    def put(self, slot: str, storages: Iterable[str]) -> None:
        """The slot is assigned: it holds the new before it lets go of the old."""
        now = tuple(storages)
        before = self.slots.pop(slot, ())
        for name in now:
            self.counts[name] += 1
        if now:
            self.slots[slot] = now
        for name in before:
            self.counts[name] -= 1
            if not self.counts[name]:
                self.dead.append(name)

    def append(self, slot: str, storages: Iterable[str]) -> None:
        """The slot is a list that grows."""
        self.put(slot, (*self.slots.get(slot, ()), *storages))

    def reap(self) -> tuple[str, ...]:
        """The storages that have died since the last call."""
        dead, self.dead = tuple(self.dead), []
        return dead
