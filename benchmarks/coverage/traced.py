"""memir's trace of a type's tiny config, and what became of the symbols."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.coverage.real import write_config
from memir.errors import MemirError
from memir.frontend.load import load_target
from memir.frontend.trace import trace
from memir.ir.core import Repeat
from memir.recipe import Recipe

BATCH, SEQ = 3, 160  # no size of a tiny config, so that nothing is equal by chance


@dataclass(frozen=True, slots=True)
class TraceRun:
    """Outcome of `trace_step`.

    `outcome` is "symbolic" (B and S stayed symbols), "pinned" (they did, but the domain allows one value only), "fit"
    (concrete traces and verified polynomials), "exit N" (an error for people with that exit code), or "crash" (any other
    exception: a bug in memir). `conditions` is the program's domain.
    """

    outcome: str
    conditions: tuple[str, ...]
    num_ops: int
    reason: str


def trace_step(model_type: str, dtype: str) -> TraceRun:
    """Trace the training step of the type's tiny config with the recipe that the real run has."""
    recipe = Recipe(target="cpu", dtype=dtype)
    with TemporaryDirectory() as folder:
        write_config(model_type, Path(folder))
        try:
            traced = trace(lambda: load_target(folder, recipe=recipe), recipe, BATCH, SEQ)
        except MemirError as error:
            return TraceRun(f"exit {error.exit_code}", (), 0, _flat(f"{error.message} ({error.where})", folder))
        except Exception as error:  # a boundary: a crash is a result of the benchmark, and the table says so
            return TraceRun("crash", (), 0, _flat(f"{type(error).__name__}: {error}", folder))
    ops = sum(len(phase.ops) for phase in traced.program.phases if not any(isinstance(op, Repeat) for op in phase.ops))
    domain = traced.program.domain
    if is_pinned(domain):
        return TraceRun("pinned", domain, ops, f"the program holds only where {' and '.join(domain)}")
    reason = "" if traced.method == "symbolic" else "; ".join(a for a in traced.assumptions if "symbolic" in a)
    return TraceRun(traced.method, domain, ops, _flat(reason, folder))


def is_pinned(domain: tuple[str, ...]) -> bool:
    """Whether the conditions leave one value of B or of S: `S == 160`, or `S >= 160` with `S <= 160`."""
    bounds = {tuple(condition.split(" ")) for condition in domain if re.fullmatch(r"[BS] [<>=]= \d+", condition)}
    return any(sign == "==" or (sign == ">=" and (name, "<=", value) in bounds) for name, sign, value in bounds)


def _flat(text: str, folder: str) -> str:
    """On one line, without the temporary folder and the installation's path."""
    text = re.sub(r"/[^\s()]*/site-packages/", "", text.replace(folder, "FOLDER"))
    return re.sub(r"\s+", " ", text).strip()[:400]
