"""memir's own answer for each cut: peak bytes from the rewritten program, the time of a step from its operators.

The machine's two rates (a matrix product's operations and a copy's bytes a second, one thread) are measured by `machine()` on
products and copies of their own, not on the steps that are predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.freeze.setting import CUTS, real_step
from memir.analysis.cost import Machine
from memir.api import program_of
from memir.cuts import plan

SIDE = 1024  # of the product's square matrices, f32: beyond the caches
ELEMENTS = 1 << 25  # of the copied vector, 128 MiB
ROUNDS = 7


def machine() -> Machine:
    """This CPU's rates with one thread."""
    torch.set_num_threads(1)
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    source, target = torch.rand(ELEMENTS), torch.empty(ELEMENTS)
    product = _seconds(lambda: torch.mm(a, b))
    copy = _seconds(lambda: target.copy_(source))
    return Machine("this CPU, one thread", (("f32", 2 * SIDE**3 / product),), 2 * 4 * ELEMENTS / copy)


def _seconds(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return median(found)


def predict(say: Callable[[str], None]) -> dict[str, Any]:
    """The machine's rates, and for each cut the peak in bytes and the time of a step as a ratio to cut 0."""
    cpu, real = machine(), real_step()
    say(f"predict: {cpu.rate('f32') / 1e9:.1f} GFLOP/s, {cpu.bandwidth / 1e9:.1f} GB/s")
    step = program_of(real.target, real.recipe, batch=real.batch, seq=real.seq, sets=real.sets, cache=False)
    cuts = {cut.cut: cut for cut in plan(step.program, step.env, cpu).cuts}
    base = cuts[0].seconds or 1.0
    answers = {str(cut): [cuts[cut].peak, round((cuts[cut].seconds or 0.0) / base, 4)] for cut in CUTS}
    return {"flops": cpu.rate("f32"), "bandwidth": cpu.bandwidth, "cuts": answers}
