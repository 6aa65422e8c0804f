"""The report as GitHub-flavoured markdown: the answer in a line, then tables.

**Peak 9.84 GiB** in backward at `aten._log_softmax_backward_data` (`model.py:187`)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TextIO

from memir.analysis.inventory import Group
from memir.analysis.words import Unit, count, option, plural
from memir.formulas import Spot
from memir.ir.core import Program
from memir.report import Report, mesh_text, program_report, verdict_text


@dataclass(frozen=True, slots=True)
class Markdown:
    """`batch` and `seq` are the point for `emit`; a report has its own."""

    name: ClassVar[str] = "markdown"
    batch: int = 1
    seq: int = 2048

    def emit(self, program: Program, out: TextIO) -> None:
        """Write the report of a bare program. Errors as `build_report`."""
        out.write(self.render(program_report(program, self.batch, self.seq)))

    def render(self, report: Report) -> str:
        """The page, ending in a newline."""
        unit = Unit.of(report.peak.requested)
        sections = [
            _head(report),
            f"**Peak {unit.text(report.peak.requested)}** {_spot(report.spot)}",
            mesh_text(report).capitalize(),
            _stages(report, unit),
            _verdict(report),
            f"Attention kernel: {', '.join(report.kernels)}" if report.kernels else "",
            _table(("", unit.name), _points(report, unit)),
            _table(
                ("At the peak", unit.name, "Share"),
                (
                    (kind.replace("_", " "), unit.number(nbytes), f"{100 * nbytes / report.peak.requested:.1f} %")
                    for kind, nbytes in report.breakdown
                    if nbytes
                ),
            ),
            _groups("Largest storages at the peak", report.top, unit),
            _groups("Alive at the peak and never used again", report.unused, unit),
            _formulas(report),
            _list("Recipe", (f"{name.replace('_', '-')}: {option(value)}" for name, value in report.recipe)),
            _list("Assumed", report.assumptions),
            _list("Inconclusive", report.inconclusive),
        ]
        return "\n\n".join(filter(None, sections)) + "\n"


def _stages(report: Report, unit: Unit) -> str:
    if not report.stages:
        return ""
    rows = ((str(s.number), unit.number(s.peak.requested), _spot(s.spot), s.answer) for s in report.stages)
    return _table(("Stage", unit.name, "Peak", ""), rows)


def _verdict(report: Report) -> str:
    found = report.verdict
    if found is None:
        return ""
    failure = f"\n\n{found.failure_in_short}" if found.failure else ""
    return f"**{found.answer.capitalize()}** {found.gpu}: {verdict_text(found)}{failure}"


def _head(report: Report) -> str:
    subject = report.subject
    facts = [
        f"`{subject.source}`" if subject.source else "",
        f"{count(subject.num_parameters)} parameters" if subject.num_parameters is not None else "",
        plural(subject.num_layers, "layer") if subject.num_layers is not None else "",
        *(f"{name}={value}" for name, value in report.symbols),
    ]
    title = subject.name or subject.target or "Memory program"
    return f"## {_escaped(title)}\n\n{', '.join(filter(None, facts))}".rstrip()


def _points(report: Report, unit: Unit) -> Iterable[tuple[str, str]]:
    yield "between steps", unit.number(report.steady.requested)
    for phase in report.phases:
        yield phase.name, unit.number(phase.requested)
    yield "peak, as the allocator rounds", unit.number(report.peak.allocated)


def _spot(spot: Spot) -> str:
    if not spot.op:
        return "at the start of the step"
    place = ", ".join(f"`{part}`" for part in (spot.source, spot.module) if part)
    return f"in {spot.phase} at `{spot.op}`" + (f" ({place})" if place else "")


def _groups(title: str, groups: Sequence[Group], unit: Unit) -> str:
    if not groups:
        return ""
    held = any(group.held_by for group in groups)
    head = (unit.name, "Count", "Kind", "Operator", "Module", "Source", *(("Held by",) if held else ()))
    rows = (
        (
            unit.number(group.nbytes),
            str(group.count),
            group.kind.replace("_", " "),
            *(f"`{part}`" if part else "" for part in (group.op, group.module, group.source)),
            *((group.held_by,) if held else ()),
        )
        for group in groups
    )
    return f"### {title}\n\n{_table(head, rows)}"


def _formulas(report: Report) -> str:
    formulas = report.formulas
    lines = [f"peak = {formulas.peak}", f"steady = {formulas.steady}"]
    lines += [f"{phase.name} = {phase.formula}" for phase in report.phases]
    text = "### Formulas\n\n```\n" + "\n".join(lines) + "\n```"
    if formulas.domain:
        text += f"\n\nBytes, valid for {', '.join(formulas.domain)}."
    if report.by_depth is not None:
        depth = report.by_depth
        lines = [f"peak = {depth.peak}", f"steady = {depth.steady}"]
        text += f"\n\nIn {depth.symbol} layers ({', '.join(depth.domain)}):\n\n```\n" + "\n".join(lines) + "\n```"
    if len(formulas.regions) > 1:
        rows = ((f"`{r.when}`", f"`{r.nbytes}`", _spot(r.spot)) for r in formulas.regions)
        text += "\n\n" + _table(("Where", "Bytes", "Peak"), rows)
    return text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    numbers = {"GiB", "MiB", "Count", "Share"}
    lines = [head, ["---:" if title in numbers else "---" for title in head], *([_escaped(c) for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list(title: str, items: Iterable[str]) -> str:
    lines = [f"- {_escaped(item)}" for item in items]
    return f"### {title}\n\n" + "\n".join(lines) if lines else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
