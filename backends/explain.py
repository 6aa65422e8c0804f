"""Every term of the report as text, without a limit of height: `memir analyze TARGET --explain`.

at the peak, largest first
    824,049,664 bytes      1 x activation       aten._log_softmax  model.py:187
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TextIO

from memir.analysis.inventory import Group
from memir.analysis.words import Unit, option, plural
from memir.formulas import Spot
from memir.ir.core import Program
from memir.report import Report, mesh_text, program_report

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Explain:
    """`batch` and `seq` are the point for `emit`; a report has its own."""

    name: ClassVar[str] = "explain"
    batch: int = 1
    seq: int = 2048

    def emit(self, program: Program, out: TextIO) -> None:
        """Write the report of a bare program. Errors as `build_report`."""
        out.write(self.render(program_report(program, self.batch, self.seq)))

    def render(self, report: Report) -> str:
        """Sections of exact bytes, ending in a newline."""
        sections = [_answer(report), _kinds(report), _alive(report), _unused(report), _formulas(report), _notes(report)]
        return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _answer(report: Report) -> Iterator[str]:
    unit, subject = Unit.of(report.peak.requested), report.subject
    at = ", ".join(f"{name}={value}" for name, value in report.symbols)
    place = f" ({subject.source})" if subject.source else ""
    yield f"{subject.name or subject.target or 'memory program'}{place}" + (f"  at {at}" if at else "")
    if report.mesh:
        yield f"  {mesh_text(report)}"
    for stage in report.stages:
        answer = f"  {stage.answer}" if stage.answer else ""
        yield f"  stage {stage.number:<8} {_bytes(stage.peak.requested)}  {_spot(stage.spot)}{answer}"
    yield f"  peak           {_bytes(report.peak.requested)}  {unit.text(report.peak.requested)}  {_spot(report.spot)}"
    yield f"    allocated    {_bytes(report.peak.allocated)}  as the target's allocator rounds"
    yield f"  between steps  {_bytes(report.steady.requested)}  {unit.text(report.steady.requested)}"
    for phase in report.phases:
        yield f"  {phase.name:13}  {_bytes(phase.requested)}  {unit.text(phase.requested)}"
    if report.kernels:
        yield f"  attention kernel  {', '.join(report.kernels)}"
    found = report.verdict
    if found is None:
        return
    yield f"  {found.answer} {found.gpu}" + (f" ({found.card}, compute capability {found.compute})" if found.card else "")
    yield f"    capacity     {_bytes(found.capacity)}"
    for term in found.workspaces:
        yield f"    held         {_bytes(term.nbytes)}  {term.name}"
    for name, nbytes in zip(("at least", "at most"), found.context, strict=True):
        if nbytes:
            yield f"    CUDA context {_bytes(nbytes)}  {name}"
    if found.reserved is not None:
        yield f"    reserved     {_bytes(found.reserved)}  by the allocator, had it no limit"
    rest = "" if found.reserved is not None else "; fragmentation not counted"
    for name, nbytes in zip(("at least", "at most"), found.needed, strict=True):
        yield f"    in all       {_bytes(nbytes)}  {name}{rest}"
    if found.after_giving_back:
        yield "    fits after cached blocks have been given back, as PyTorch does before it gives up"
    if found.failure:
        yield f"    {found.failure}"


def _kinds(report: Report) -> Iterator[str]:
    yield "at the peak, by kind"
    for kind, nbytes in report.breakdown:
        if nbytes:
            yield f"  {kind:15}{_bytes(nbytes)}  {100 * nbytes / report.peak.requested:5.1f} %"
    yield f"  {'sum':15}{_bytes(sum(nbytes for _, nbytes in report.breakdown))}"


def _alive(report: Report) -> Iterator[str]:
    if not report.top:
        return
    yield "alive at the peak, the largest: bytes, how many, kind, operator, module, line"
    for group in report.top:
        yield _group(group)
    rest = report.peak.requested - sum(group.nbytes for group in report.top)
    if rest:
        yield f"  {_bytes(rest)}  in smaller ones"


def _unused(report: Report) -> Iterator[str]:
    if not report.unused:
        return
    yield "alive at the peak and never used again"
    for group in report.unused:
        yield _group(group) + (f"  held by {group.held_by}" if group.held_by else "")


def _formulas(report: Report) -> Iterator[str]:
    formulas = report.formulas
    yield "formulas, in bytes" + (f", valid for {', '.join(formulas.domain)}" if formulas.domain else "")
    yield from _formula("peak", formulas.peak)
    yield from _formula("between steps", formulas.steady)
    for phase in report.phases:
        yield from _formula(phase.name, phase.formula)
    if len(formulas.regions) > 1:
        for region in formulas.regions:
            yield f"  where {region.when}"
            yield from (f"  {line}" for line in _formula("peak", region.nbytes))
            yield f"    {_spot(region.spot)}"
    if report.by_depth is not None:
        depth = report.by_depth
        yield f"in {depth.symbol} layers, valid for {', '.join(depth.domain)}"
        yield from _formula("peak", depth.peak)
        yield from _formula("between steps", depth.steady)
    for name, meaning in formulas.symbols:
        if meaning:
            yield f"  {name}: {meaning}"


def _notes(report: Report) -> Iterator[str]:
    for title, items in (
        ("recipe", [f"{name.replace('_', '-'):15} {option(value)}" for name, value in report.recipe]),
        ("assumed", report.assumptions),
        ("inconclusive", report.inconclusive),
        ("versions", [f"{name} {version}" for name, version in report.subject.versions]),
    ):
        if items:
            yield title
            for item in items:
                yield from textwrap.wrap(item, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _group(group: Group) -> str:
    where = "  ".join(filter(None, (group.op, group.module and f"@{group.module}", group.source)))
    return f"  {_bytes(group.nbytes)}  {plural(group.count, 'storage'):>12}  {group.kind:15}  {where}".rstrip()


def _formula(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name} = {text}", WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)


def _spot(spot: Spot) -> str:
    if not spot.op:
        return "at the start of the step"
    place = ", ".join(filter(None, (spot.source, spot.module)))
    return f"in {spot.phase} at {spot.op}" + (f" ({place})" if place else "")


def _bytes(nbytes: int) -> str:
    return f"{nbytes:>18,} bytes"
