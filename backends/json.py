"""The report as JSON; docs/analyze.schema.json is its schema. Bytes are whole numbers, formulas are text that sympy parses.

{"schema_version": 1, "target": "model.py", ..., "peak": {"requested_bytes": 10565779456, ...}, ...}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO

from memir.analysis.inventory import Group
from memir.cuda.verdict import Verdict
from memir.ir.core import Program
from memir.report import SCHEMA_VERSION, Report, StageReport, program_report


@dataclass(frozen=True, slots=True)
class Json:
    """`batch` and `seq` are the point for `emit`; a report has its own. `indent` 0 prints one line."""

    name: ClassVar[str] = "json"
    batch: int = 1
    seq: int = 2048
    indent: int = 2

    def emit(self, program: Program, out: TextIO) -> None:
        """Write the report of a bare program. Errors as `build_report`."""
        out.write(self.render(program_report(program, self.batch, self.seq)))

    def render(self, report: Report) -> str:
        """The report as one JSON document, ending in a newline."""
        return json.dumps(as_dict(report), indent=self.indent or None, ensure_ascii=False) + "\n"


def as_dict(report: Report) -> dict[str, Any]:
    """The document as plain data."""
    formulas = report.formulas
    return {
        "schema_version": SCHEMA_VERSION,
        "target": report.subject.target,
        "recipe": dict(report.recipe),
        "versions": dict(report.subject.versions),
        "symbols": dict(report.symbols),
        "mesh": dict(report.mesh),
        "host_bytes": report.host,
        "stages": [_stage(stage) for stage in report.stages],
        "peak": {
            "requested_bytes": report.peak.requested,
            "allocated_bytes": report.peak.allocated,
            "phase": report.spot.phase,
            "op": report.spot.op,
            "module": report.spot.module,
            "source": report.spot.source,
        },
        "steady": {"requested_bytes": report.steady.requested, "allocated_bytes": report.steady.allocated},
        "attention_kernels": list(report.kernels),
        "phases": {phase.name: phase.requested for phase in report.phases},
        "breakdown": dict(report.breakdown),
        "top": [_group(group) for group in report.top],
        "unused_at_peak": [{**_group(group), "held_by": group.held_by} for group in report.unused],
        "formula": {
            "peak": formulas.peak,
            "steady": formulas.steady,
            "regions": [
                {"when": r.when, "bytes": r.nbytes, "phase": r.spot.phase, "module": r.spot.module} for r in formulas.regions
            ],
            "symbols": dict(formulas.symbols),
            "domain": list(formulas.domain),
        },
        "formula_by_depth": None
        if report.by_depth is None
        else {
            "symbol": report.by_depth.symbol,
            "value": report.by_depth.value,
            "peak": report.by_depth.peak,
            "steady": report.by_depth.steady,
            "domain": list(report.by_depth.domain),
        },
        "gpu": None if report.verdict is None else _verdict(report.verdict),
        "assumptions": list(report.assumptions),
        "inconclusive": list(report.inconclusive),
    }


def _stage(stage: StageReport) -> dict[str, Any]:
    return {
        "stage": stage.number,
        "requested_bytes": stage.peak.requested,
        "allocated_bytes": stage.peak.allocated,
        "steady_bytes": stage.steady.requested,
        "phase": stage.spot.phase,
        "op": stage.spot.op,
        "module": stage.spot.module,
        "source": stage.spot.source,
        "verdict": stage.answer or None,
    }


def _verdict(found: Verdict) -> dict[str, Any]:
    return {
        "name": found.gpu,
        "card": found.card,
        "compute_capability": found.compute,
        "capacity_bytes": found.capacity,
        "allocated_bytes": found.allocated,
        "workspaces": [{"name": term.name, "bytes": term.nbytes} for term in found.workspaces],
        "context_bytes": list(found.context),
        "nccl_bytes": list(found.nccl),
        "reserved_bytes": found.reserved,
        "needed_bytes": list(found.needed),
        "verdict": found.answer,
        "failure": found.failure or None,
    }


def _group(group: Group) -> dict[str, Any]:
    return {
        "bytes": group.nbytes,
        "count": group.count,
        "kind": group.kind,
        "op": group.op,
        "module": group.module,
        "source": group.source,
    }
