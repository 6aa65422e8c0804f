"""A step's time by cut: all cuts in one process, in turn, so that a busy moment meets them all; medians."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.freeze.setting import CUTS, SEQ, STEP_BATCH, VOCABULARY, real_step
from memir.freezing import ActivationCache, FrozenPrefix
from memir.runtime.real import builder

ROUNDS, WARM = 15, 3


def freezing(cut: int, cache: ActivationCache | None = None) -> Callable[[nn.Module], None]:
    """What makes a freshly built model's first `cut` layers a frozen prefix."""

    def adjust(module: nn.Module) -> None:
        prefix = FrozenPrefix(module, cache=cache)
        prefix.observe(torch.zeros((1, 2), dtype=torch.long))
        prefix.set_cut(cut)

    return adjust


def step_times(say: Callable[[str], None]) -> dict[str, Any]:
    """CPU and wall seconds of each cut's step, without and with cached activations."""
    steps: dict[str, Callable[[], object]] = {}
    caches = []
    for cut in CUTS:
        steps[f"{cut}"] = builder(real_step(), freezing(cut))()
        if cut:
            caches.append(ActivationCache())
            steps[f"{cut} cached"] = builder(real_step(), freezing(cut, caches[-1]))()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    gc.disable()
    for number in range(WARM + ROUNDS):
        for name, step in steps.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
        say(f"steps: round {number + 1} of {WARM + ROUNDS}")
    gc.enable()
    if any(cache.problem or cache.hits < ROUNDS for cache in caches):
        raise SystemExit(f"a cache did not serve: {[(cache.problem, cache.hits) for cache in caches]}")
    return {
        "batch": STEP_BATCH,
        "seq": SEQ,
        "vocabulary": VOCABULARY,
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
        "cuts": {
            name: {
                "cpu_seconds": round(median(cpu for cpu, _ in found[WARM:]), 5),
                "wall_seconds": round(median(wall for _, wall in found[WARM:]), 5),
            }
            for name, found in seconds.items()
        },
    }
