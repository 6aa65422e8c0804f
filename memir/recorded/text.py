"""A comparison as text for people and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memir.recorded.compare import Comparison, Request, Row

LISTED = 6  # sizes that only one of the two has


def to_text(found: Comparison, title: str) -> str:
    """One screen; errors are predicted minus recorded."""
    lines = [f"{title}   recorded: {found.num_events:,} events, the step told by {found.by}", ""]
    lines.append(f"  {'bytes':<16}{'predicted':>20}{'recorded':>20}{'error':>18}")
    figures = [(row.name, row, "requested") for row in (found.steady, *found.phases)]
    figures += [("peak", found.step, "requested"), ("allocated", found.step, "rounded"), ("reserved", found.step, "reserved")]
    lines += [_figure(*figure) for figure in figures]
    lines.append(_line("allocations", found.step.num_predicted, found.step.num_recorded))
    lines.append("")
    if found.first is None:
        lines.append("  no difference: the same sizes in the same order")
        return "\n".join(lines)
    lines.append(f"  first difference: allocation {found.first.number:,} of the step")
    lines += [_request("predicted", found.first.predicted), _request("recorded", found.first.recorded)]
    for name, sizes in (("predicted only", found.only_predicted), ("recorded only", found.only_recorded)):
        if sizes:
            lines.append(f"  {name}: {_sizes(sizes)}")
    return "\n".join(lines)


def _figure(name: str, row: Row, field: str) -> str:
    return _line(name, getattr(row.predicted, field), None if row.recorded is None else getattr(row.recorded, field))


def _line(name: str, predicted: int, recorded: int | None) -> str:
    if recorded is None:
        return f"  {name:<16}{predicted:>20,}{'?':>20}"
    share = f"{(predicted - recorded) / recorded:+.4%}" if recorded and predicted != recorded else ""
    return f"  {name:<16}{predicted:>20,}{recorded:>20,}{predicted - recorded:>+18,}  {share}".rstrip()


def _request(name: str, request: Request | None) -> str:
    return f"    {name:<10}" + ("none any more" if request is None else f"{request.nbytes:>16,}  {request.place}".rstrip())


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    rest = len(sizes) - LISTED
    return ", ".join(f"{count:,} x {nbytes:,}" for nbytes, count in sizes[:LISTED]) + (f", and {rest} more" if rest > 0 else "")


def to_data(found: Comparison) -> dict[str, Any]:
    """All figures in bytes. `requested` is as asked for, `rounded` up to 512 bytes each, `reserved` taken from the device."""
    return {
        "schema_version": 1,
        "step_told_by": found.by,
        "recorded_events": found.num_events,
        "between_steps": _row(found.steady),
        "phases": [{"name": row.name, **_row(row)} for row in found.phases],
        "step": _row(found.step),
        "first_difference": None if found.first is None else asdict(found.first),
        "predicted_only": [{"bytes": nbytes, "count": count} for nbytes, count in found.only_predicted],
        "recorded_only": [{"bytes": nbytes, "count": count} for nbytes, count in found.only_recorded],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "predicted": asdict(row.predicted),
        "recorded": None if row.recorded is None else asdict(row.recorded),
        "predicted_allocations": row.num_predicted,
        "recorded_allocations": row.num_recorded,
    }
