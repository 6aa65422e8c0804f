"""What is measured: commands, and the aims that their ratios have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
SWEEP = ("-b", "1:64", "-s", "512:8000:48")  # 64 x 157 = 10,048 points
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A command. `cache` says what memir's cache holds: "fresh" an empty one each time, "warm" what was asked before."""

    name: str
    command: tuple[str, ...]
    cache: str = "fresh"
    is_slow: bool = False  # minutes: once, unless told otherwise


def _analyze(model: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "memir", "analyze", model, "-b", "1", "-s", "2048")


def _memtracker(model: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "benchmarks.speed.memtracker", model)


def all_cases(folder: Path) -> list[Case]:
    """Every case in the order of the table; `folder` is where the sweep writes its rows."""
    sweep = (PYTHON, "-m", "memir", "sweep", MODELS[0], *SWEEP, "--format", "csv", "-o", str(folder / "sweep.csv"))
    return [
        Case("import torch and llama", (PYTHON, "-c", "import torch, transformers.models.llama.modeling_llama")),
        Case("import click, sympy", (PYTHON, "-c", "import click, sympy")),
        *(Case(f"cold {model}", _analyze(model)) for model in MODELS),
        *(Case(f"cached {model}", _analyze(model), "warm") for model in MODELS),
        Case(f"sweep {MODELS[0]}", sweep, "warm"),
        *(Case(f"MemTracker {model}", _memtracker(model), is_slow=True) for model in MODELS[:2]),
    ]


@dataclass(frozen=True, slots=True)
class Figures:
    """The median of a case's runs: wall seconds, and the largest resident set in bytes."""

    seconds: float
    peak: int


@dataclass(frozen=True, slots=True)
class Aim:
    """A ratio (or an amount) that should be at most, or at least, `bound`; `needs` are the cases that it compares."""

    text: str
    needs: tuple[str, ...]
    value: Callable[[Mapping[str, Figures]], float]
    bound: float
    at_least: bool = False
    unit: str = "times"

    def is_met(self, figures: Mapping[str, Figures]) -> bool:
        """Whether the figures reach it."""
        value = self.value(figures)
        return value >= self.bound if self.at_least else value <= self.bound


def _ratio(above: str, below: str, text: str, bound: float, *, at_least: bool = False) -> Aim:
    """Seconds of one case for one second of another."""
    return Aim(text, (above, below), lambda f: f[above].seconds / f[below].seconds, bound, at_least)


SMALL, LARGE, HUGE = MODELS
AIMS = [
    _ratio(f"cold {SMALL}", "import torch and llama", "cold 8B, in imports of torch and llama", 2),
    _ratio(f"MemTracker {SMALL}", f"cold {SMALL}", "MemTracker at 8B, in cold analyses", 4, at_least=True),
    _ratio(f"MemTracker {LARGE}", f"cold {LARGE}", "MemTracker at 70B, in cold analyses", 25, at_least=True),
    _ratio(f"cold {HUGE}", f"cold {SMALL}", "cold 405B, in cold analyses of 8B", 1.3),
    _ratio(f"cached {SMALL}", "import click, sympy", "cached 8B, in imports of click and sympy", 3),
    _ratio(f"MemTracker {SMALL}", f"cached {SMALL}", "MemTracker at 8B, in cached analyses", 25, at_least=True),
    _ratio(f"MemTracker {LARGE}", f"cached {LARGE}", "MemTracker at 70B, in cached analyses", 150, at_least=True),
    Aim("a sweep of 10,048 points of 8B, cached", (f"sweep {SMALL}",), lambda f: f[f"sweep {SMALL}"].seconds, 2, unit="s"),
    Aim("memory of cold 405B", (f"cold {HUGE}",), lambda f: f[f"cold {HUGE}"].peak / GIB, 2, unit="GiB"),
]
