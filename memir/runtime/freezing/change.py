"""AutoFreeze's test: how much the norm of each layer's gradient, summed over an interval, changed since the interval before.

arXiv 2102.01386, as its released code computes it (github uw-mad-dash/AutoFreeze): D of a layer is the L1 norm of its
summed gradient, eta = |D_before - D_now| / D_before, and the front layers whose eta lies below the N-th percentile of all
trainable layers freeze, up to the first that does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Decision:
    """The cut that a test ends with, and what it was decided on. `changes` and `threshold` are of the layers from `old` on."""

    old: int
    cut: int
    changes: tuple[float, ...]
    threshold: float
    percentile: float

    def why(self) -> str:
        """In words, without the step."""
        frozen = self.cut - self.old
        shown = ", ".join(f"{change:.3g}" for change in self.changes[: max(frozen, 1)])
        last = self.old + len(self.changes) - 1
        bound = f"below {self.threshold:.3g}, percentile {self.percentile:g} of layers {self.old} to {last}"
        if not frozen:
            return f"layer {self.old} trains on: its gradient norm changed by {shown}, not {bound}"
        next_one = f"; layer {self.cut} changed by {self.changes[frozen]:.3g}"
        if frozen == 1:
            return f"layer {self.old} frozen: its gradient norm changed by {shown}, {bound}{next_one}"
        return f"layers {self.old} to {self.cut - 1} frozen: their gradient norms changed by {shown}, {bound}{next_one}"


def decide(before: Sequence[float], now: Sequence[float], cut: int, percentile: float, most: int) -> Decision | None:
    """The new cut, at most `most`, from the norms of all layers in two intervals; None when a norm is not a finite number."""
    if not all(map(math.isfinite, [*before[cut:], *now[cut:]])):
        return None
    changes = [_change(a, b) for a, b in zip(before[cut:], now[cut:], strict=True)]
    threshold = _percentile(changes, percentile)
    new = cut
    while new < most and changes[new - cut] < threshold:
        new += 1
    return Decision(cut, new, tuple(changes), threshold, percentile)


def _percentile(values: Sequence[float], percentile: float) -> float:
    """The percentile with linear interpolation between neighbours, as numpy.percentile's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percentile / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]  # also where both are infinite
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _change(before: float, now: float) -> float:
    if before == 0:
        return 0.0 if now == 0 else math.inf
    return abs(before - now) / before


class GradientSums:
    """Sums of gradients over an interval, fp32, one for each trainable parameter of a layer that is not frozen.

    They take 4 bytes a parameter, on the parameter's device, as the released code's do; those of frozen layers are given back.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self.steps = 0
        self.sums: list[dict[str, Tensor]] = [{} for _ in layers]

    @property
    def nbytes(self) -> int:
        """Bytes that the sums hold now."""
        return sum(4 * tensor.numel() for sums in self.sums for tensor in sums.values())

    @torch.no_grad()
    def add(self, cut: int) -> bool:
        """Adds the gradients that are there now; whether the first layer that should train had any."""
        reached = False
        for number, layer in enumerate(self._layers[cut:], cut):
            for name, parameter in layer.named_parameters():
                gradient = parameter.grad
                if gradient is None:
                    continue
                reached = reached or number == cut
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                total = self.sums[number].get(name)
                if total is None:
                    self.sums[number][name] = gradient.detach().to(torch.float32, copy=True)
                else:
                    total.add_(gradient)
        self.steps += 1
        return reached or not any(p.requires_grad for p in self._layers[cut].parameters())

    @torch.no_grad()
    def norms(self) -> list[float]:
        """The L1 norm of each layer's sums, 0 for a layer without gradients."""
        parts = [[tensor.abs().sum(dtype=torch.float32) for tensor in sums.values()] for sums in self.sums]
        totals = [torch.stack(part).sum() if part else None for part in parts]
        return [0.0 if total is None else float(total) for total in totals]

    def restart(self, cut: int) -> None:
        """Begins an interval; layers below the cut are counted no more."""
        self.steps = 0
        for number, sums in enumerate(self.sums):
            if number < cut:
                sums.clear()
            for tensor in sums.values():
                tensor.zero_()
