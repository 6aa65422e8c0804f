"""A step's computing in parts: what comes before the layers, the layers, what comes after, the optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memir.analysis.cost.device import DISPATCH, LAUNCH, Device
from memir.analysis.cost.operators import Spent, once
from memir.analysis.flops import Work
from memir.ir.size import ZERO, Size

Env = Mapping[str, int]
COLLECTIVES = ("c10d.", "_c10d_functional.")  # opcodes of what is communicated, which the schedule times
_LAYER = re.compile(r"(?:^|\.)(?:\d+|\{[^}]*\}|\*)\.")
_NONE = Spent()


@dataclass(frozen=True, slots=True)
class Parts:
    """Time of one micro-batch; `layer_forward` and `layer_backward` are of all layers together, recomputation in the latter.

    `before` and `after` the layers: the embedding; the last norm, the head and the loss.
    """

    layers: int
    before_forward: Spent
    layer_forward: Spent
    after_forward: Spent
    after_backward: Spent
    layer_backward: Spent
    before_backward: Spent
    optimizer: Spent

    @property
    def forward(self) -> Spent:
        """All of a micro-batch's forward."""
        return self.before_forward + self.layer_forward + self.after_forward

    @property
    def backward(self) -> Spent:
        """All of its backward."""
        return self.after_backward + self.layer_backward + self.before_backward


class Costs:
    """A step's operators summed up by their part, to be evaluated at many sizes.

    An operator belongs to the layers where its module's path has a number; what has none belongs to what is before or after
    them, by where it stands. Operators that only move bytes are one sum; products and attention of one shape are one entry.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._moved: dict[str, Size] = {}
        self._launches: dict[str, Size] = {}
        self._shaped: dict[str, dict[tuple[object, ...], Work]] = {}
        seen: set[str] = set()
        for work in works:
            if work.op.opcode.startswith(COLLECTIVES):
                continue
            place = _place(work, seen)
            seen.add(place)
            if not work.shape.form:
                self._moved[place] = self._moved.get(place, ZERO) + work.times * work.nbytes
                self._launches[place] = self._launches.get(place, ZERO) + work.times
                continue
            key: tuple[object, ...] = (work.shape.form, work.shape.dims, work.dtype)
            if work.shape.form in ("forward", "backward"):
                key += (work.op.opcode, len(work.op.operands), work.nbytes)
            shaped = self._shaped.setdefault(place, {})
            same = shaped.get(key)
            shaped[key] = work if same is None else replace(same, times=same.times + work.times)

    def bound(self, env: Mapping[str, int]) -> Costs:
        """The same with numbers for these symbols: what is to be evaluated at many other sizes. ValueError where one is not
        whole."""
        new = Costs(())
        new._moved = {place: size.substitute(env) for place, size in self._moved.items()}
        new._launches = {place: size.substitute(env) for place, size in self._launches.items()}
        new._shaped = {place: {key: work.bound(env) for key, work in works.items()} for place, works in self._shaped.items()}
        return new

    def at(self, env: Env, device: Device, layers: int, microbatches: int = 1) -> Parts:
        """One micro-batch at `env`, of a step that has so many. `env` has every symbol of the operators."""
        sums = {place: self._spent(place, env, device) for place in {*self._moved, *self._shaped}}
        part = 1 / microbatches

        def one(place: str) -> Spent:
            return sums.get(place, _NONE) * part

        return Parts(
            layers,
            one("before_forward"),
            one("layer_forward"),
            one("after_forward"),
            one("after_backward"),
            one("layer_backward"),
            one("before_backward"),
            sums.get("optimizer", _NONE),
        )

    def _spent(self, place: str, env: Env, device: Device) -> Spent:
        launches = self._launches.get(place, ZERO).evaluate(env)
        moved = self._moved.get(place, ZERO).evaluate(env)
        total = Spent(memory=moved / device.bandwidth, launch=launches * LAUNCH, host=launches * DISPATCH)
        for work in self._shaped.get(place, {}).values():
            times = work.times.evaluate(env)
            if times:
                total = total + once(work, env, device) * times
        return total


def parts(works: Sequence[Work], env: Env, device: Device, layers: int) -> Parts:
    """The parts of a step of one micro-batch at `env`."""
    return Costs(works).at(env, device, layers)


def _place(work: Work, seen: set[str]) -> str:
    phase = work.phase.rpartition(".")[2]
    if phase not in ("forward", "backward"):
        return "optimizer"
    if _LAYER.search(work.op.path):
        return f"layer_{phase}"
    return f"{'after' if (f'layer_{phase}' in seen) == (phase == 'forward') else 'before'}_{phase}"
