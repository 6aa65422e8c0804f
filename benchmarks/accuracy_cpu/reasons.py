"""Why a case is off by more than 1 KiB: the physical reason of each, as `memir verify` on it shows."""

from __future__ import annotations

from benchmarks.accuracy_cpu.cases import Case

DATA_DEPENDENT = (
    "data-dependent: each expert's matrices are as large as the random router's choice; memir takes a balanced load"
    " (the same model with that load by construction is the case without -routed)"
)


def reason_of(case: Case) -> str:
    """The reason of a difference beyond 1 KiB in this case; empty where none is known: then it is a bug."""
    return DATA_DEPENDENT if case.model.endswith("-routed") else ""
