"""A scenario: one training step under a name, and the budgets that it has to keep. docs/check.md describes every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memir.hardware import Gpu
from memir.ir.size import Size
from memir.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Increase:
    """How much more than the baseline a peak may be: bytes, or a share in millionths; one of them is 0."""

    text: str
    nbytes: int = 0
    millionths: int = 0

    def allowed(self, base: int) -> int:
        """The bytes that a peak of `base` may grow by."""
        return self.nbytes + base * self.millionths // 1_000_000


@dataclass(frozen=True, slots=True)
class Budgets:
    """What a step may take at most; None where nothing is said. Bytes."""

    max: int | None = None  # allocated bytes at the peak
    max_increase: Increase | None = None
    max_order: Size | None = None  # a product or sum of products; no term of the peak grows faster
    fits: Gpu | None = None
    max_saved_per_layer: int | None = None  # kept for backward by one decoder layer


@dataclass(frozen=True, slots=True)
class Scenario:
    """A step and its budgets. `batch` and `seq` are None where the defaults hold."""

    name: str
    target: str
    recipe: Recipe
    batch: int | None = None
    seq: int | None = None
    sets: Mapping[str, str] = field(default_factory=dict)
    inputs: str | None = None
    trust_remote_code: bool = False
    parallel: str = ""  # passes of distributed methods, as --parallel takes them
    budgets: Budgets = Budgets()
    skip: str = ""  # why it is not checked
    file: str = ""  # of its configuration, and the line there
    line: int = 0

    def keywords(self) -> dict[str, object]:
        """The keyword arguments of `memir.api.program_of`."""
        return {
            "batch": self.batch,
            "seq": self.seq,
            "sets": dict(self.sets),
            "inputs": self.inputs,
            "trust_remote_code": self.trust_remote_code,
            "parallel": self.parallel,
        }
