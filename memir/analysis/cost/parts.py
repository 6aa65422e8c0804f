"""A step's computing in parts: what comes before the layers, the layers, what comes after, the optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.cost.device import Device
from memir.analysis.cost.operators import Spent, once
from memir.analysis.flops import Work

Env = Mapping[str, int]
_LAYER = re.compile(r"(?:^|\.)(?:\d+|\{[^}]*\}|\*)\.")


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


def parts(works: Sequence[Work], env: Env, device: Device, layers: int) -> Parts:
    """The parts of a step's operators at `env`. Several micro-batches in a program are one after the other, and are summed.

    An operator belongs to the layers where its module's path has a number; what has none belongs to what is before or after
    them, by where it stands.
    """
    sums: dict[str, Spent] = {}
    seen: set[str] = set()
    for work in works:
        times = work.times.evaluate(env)
        if not times:
            continue
        phase = work.phase.rpartition(".")[2]
        if phase not in ("forward", "backward"):
            place = "optimizer"
        elif _LAYER.search(work.op.path):
            place = f"layer_{phase}"
        else:
            place = f"{'after' if (f'layer_{phase}' in seen) == (phase == 'forward') else 'before'}_{phase}"
        seen.add(place)
        sums[place] = sums.get(place, Spent()) + once(work, env, device) * times
    none = Spent()
    return Parts(
        layers,
        sums.get("before_forward", none),
        sums.get("layer_forward", none),
        sums.get("after_forward", none),
        sums.get("after_backward", none),
        sums.get("layer_backward", none),
        sums.get("before_backward", none),
        sums.get("optimizer", none),
    )
