"""A cache of the frozen part's output: its bytes, and from which cut on reading it is faster than computing it.

AutoFreeze (arXiv 2102.01386, section 4.2) keeps the last frozen layer's output for each sample; its bytes do not depend on the
cut where all layers are as wide. Reading pays where bytes / bandwidth is less than the time of the frozen layers' forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memir.cuts.plan import Plan
from memir.ir.core import Kind, Program
from memir.ir.size import ZERO, Size
from memir.rewrite.cut import layers_of
from memir.rewrite.flow import Flow

BANDWIDTH = {"disk": 3.0e9, "host": 25.0e9}  # bytes/s: an NVMe drive's sequential reads; pinned memory over PCIe 4.0 x16
CONDITIONS = (
    "the frozen layers run in eval mode: a dropout there would be another one in every epoch",
    "each sample is tokenized, padded and packed alike in every epoch",
    "the cut does not change while the cache is read, or the layers between run again",
)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Bytes of a cache and the cut from which on it pays; None: at no cut, or no time was predicted."""

    where: str
    bandwidth: float
    step_bytes: int  # of one batch
    dataset_bytes: int | None
    break_even: int | None


def boundary(flat: Program, cut: int) -> Size:
    """Bytes that cross from the frozen layers into the trained ones, of the batch: what has to be kept for them."""
    flow = Flow(flat)
    layers = layers_of(flow)
    storages = {s.name: s for s in flat.storages}
    crossing: set[str] = set()
    for position, layer in layers.of.items():
        if layer < cut or not flow.phase[position].endswith("forward"):
            continue
        for name in flow.reads(position):
            born = flow.born.get(name)
            if born is not None and layers.of.get(born, cut) < cut and storages[name].kind != Kind.PARAMETER:
                crossing.add(name)
    total = ZERO
    for name in crossing:
        if "B" in storages[name].nbytes.symbols():  # masks and rotary tables of no batch are made again
            total = total + storages[name].nbytes
    return total


def cache_plan(
    plan: Plan, where: str, bandwidth: float | None, samples: int | None, tokens: int | None, env: Mapping[str, int], size: Size
) -> CachePlan:
    """The cache on "disk" or in the "host"'s memory. `tokens`: a sample's mean length if they are packed, else S is taken."""
    speed = bandwidth or BANDWIDTH[where]
    step_bytes = size.evaluate(env)
    per_token = step_bytes / (env["B"] * env["S"])
    dataset = None if samples is None else round(per_token * samples * (tokens or env["S"]))
    break_even = None
    if plan.cuts[0].seconds is not None:
        for cut in plan.cuts[1:]:
            if step_bytes / speed < (cut.seconds or 0.0) - (cut.cached_seconds or 0.0):
                break_even = cut.cut
                break
    return CachePlan(where, speed, step_bytes, dataset, break_even)
