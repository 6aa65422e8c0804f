"""The coverage table: every causal-LM model type of the installed transformers, run for real and traced.

python -m benchmarks.coverage                  all types; writes benchmarks/coverage/results.csv and prints a summary
python -m benchmarks.coverage llama mixtral    only these, printed
"""

from __future__ import annotations

import csv
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results.csv"
COLUMNS = ("model_type", "ran", "dtype", "parameters", "traced", "operators", "conditions", "reason")
TIMEOUT = 300.0  # seconds for one trace; a real step takes under one


@dataclass(frozen=True, slots=True)
class Row:
    """One model type's line of the table; `traced` is as in `TraceRun.outcome`, empty when it did not run."""

    model_type: str
    ran: bool
    dtype: str
    parameters: int
    traced: str
    operators: int
    conditions: tuple[str, ...]
    reason: str

    def cells(self) -> tuple[str, ...]:
        ran, numbers = "yes" if self.ran else "no", [str(n) if n else "" for n in (self.parameters, self.operators)]
        conditions = "; ".join(self.conditions)
        return (self.model_type, ran, self.dtype, numbers[0], self.traced, numbers[1], conditions, self.reason)


def main(arguments: list[str]) -> int:
    """Returns 0 when every type that runs is traced or exits 3 with its reason; 1 otherwise, 2 for an unknown type."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    warnings.simplefilter("ignore")  # the libraries' remarks on odd configs
    import torch

    from benchmarks.coverage.tiny import model_types

    torch.set_num_threads(1)  # also what makes forking safe
    known = model_types()
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        print(f"not a causal-LM model type of the installed transformers: {', '.join(unknown)}", file=sys.stderr)
        return 2
    rows = []
    for place, model_type in enumerate(arguments or known, 1):
        rows.append(try_type(model_type))
        print(f"{place:>3} {' | '.join(rows[-1].cells())}", file=sys.stderr, flush=True)
    if not arguments:
        write_table(rows, RESULTS)
    print(summary(rows))
    return 0 if all(row.traced in ("symbolic", "pinned", "fit", "exit 3") for row in rows if row.ran) else 1


def try_type(model_type: str) -> Row:
    """Run one type for real and, if it runs, trace it; each in a process of its own."""
    from benchmarks.coverage.isolate import ChildError, isolated
    from benchmarks.coverage.real import real_step
    from benchmarks.coverage.traced import trace_step

    try:
        real = isolated(real_step, model_type, timeout=TIMEOUT)
    except ChildError as error:
        return Row(model_type, False, "", 0, "", 0, (), str(error))
    if not real.dtype:
        return Row(model_type, False, "", 0, "", 0, (), real.reason)
    try:
        traced = isolated(trace_step, model_type, real.dtype, timeout=TIMEOUT)
    except ChildError as error:
        return Row(model_type, True, real.dtype, real.num_parameters, "crash", 0, (), str(error))
    return Row(
        model_type,
        True,
        real.dtype,
        real.num_parameters,
        traced.outcome,
        traced.num_ops,
        traced.conditions,
        traced.reason,
    )


def write_table(rows: list[Row], path: Path) -> None:
    """The table as CSV, sorted by model type."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(row.cells() for row in rows))


def summary(rows: list[Row]) -> str:
    """How many ran, how many were traced in which way, and the reason of each of the others."""
    ran = [row for row in rows if row.ran]
    symbolic = [row for row in ran if row.traced == "symbolic"]
    fitted = [row for row in ran if row.traced == "fit"]
    both = len(symbolic) + len(fitted)
    share = f" ({100 * both / len(ran):.1f} %)" if ran else ""
    lines = [
        f"{len(rows)} model types, {len(ran)} run one real training step",
        f"{both} of these{share} are traced with B and S in every size: {len(symbolic)} with both as symbols of one trace,",
        f"  {len(fitted)} with S fitted to traces at several lengths and verified at others",
    ]
    lines += [f"  {row.model_type}: {row.traced}: {row.reason}" for row in ran if row.traced != "symbolic"]
    if len(ran) < len(rows):
        lines += ["not run:", *(f"  {row.model_type}: {row.reason}" for row in rows if not row.ran)]
    return "\n".join(lines)
