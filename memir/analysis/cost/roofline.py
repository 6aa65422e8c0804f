"""How long a step takes: each operator at the pace of what limits it, its arithmetic or its memory traffic.

The roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009): an operator takes the longer of operations / rate and
bytes / bandwidth. Launching is not counted: a step that is limited by launches takes longer on every side of a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.flops import Work


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device does in a second: operations by element type, and bytes to and from its memory."""

    name: str
    rates: tuple[tuple[str, float], ...]  # element type -> operations a second in a matrix product
    bandwidth: float  # bytes a second

    def rate(self, dtype: str) -> float:
        """Operations a second in this type; of the slowest known one where it is not listed."""
        return dict(self.rates).get(dtype) or min(rate for _, rate in self.rates)


def seconds(works: Sequence[Work], env: Mapping[str, int], machine: Machine) -> float:
    """The time of a step at `env`, in seconds."""
    total = 0.0
    for work in works:
        times = work.times.evaluate(env)
        arithmetic = work.flops.evaluate(env) / machine.rate(work.dtype) if work.flops.terms else 0.0
        total += times * max(arithmetic, work.nbytes.evaluate(env) / machine.bandwidth)
    return total
