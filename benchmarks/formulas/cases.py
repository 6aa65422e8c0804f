"""Whose formulas are verified, and at which points: always the same ones, chosen at random once by their seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

PRESETS = (
    "falcon-7b",
    "gemma-2-2b",
    "gpt2",
    "llama-3.1-8b",
    "mistral-7b",
    "olmo-2-7b",
    "opt-1.3b",
    "phi-2",
    "pythia-1.4b",
    "qwen3-8b",
)
NUM_POINTS = 20  # of B, S and L, at the model's own widths
NUM_TRACES = 2  # that those points are spread over
NUM_WIDTHS = 5  # sets of random widths, with B, S and L
PERIODS = {"gemma-2-2b": 2}  # layers in a unit that repeats
LONGEST = 1024  # tokens, and at most half of what the model accepts
REAL = ("gpt2", "llama-3.1-8b", "qwen3-8b")  # also run for real on the CPU, at small widths


@dataclass(frozen=True, slots=True)
class Point:
    """Where a formula is compared. `seed` chooses widths too; None: the model's own."""

    batch: int
    seq: int
    layers: int
    seed: int | None = None


def points_of(preset: str) -> tuple[tuple[Point, ...], ...]:
    """The points of a preset, those of one trace together: the model is traced anew at the first, B, S and L are symbols."""
    random = Random(preset)
    period = PERIODS.get(preset, 1)

    def point(seed: int | None) -> Point:
        layers = period * random.randrange(5, 24)
        return Point(random.randrange(2, 17), random.randrange(16, LONGEST + 1), layers, seed)

    own = tuple(tuple(point(None) for _ in range(NUM_POINTS // NUM_TRACES)) for _ in range(NUM_TRACES))
    return (*own, *((point(seed),) for seed in range(1, NUM_WIDTHS + 1)))
