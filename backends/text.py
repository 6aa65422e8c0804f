"""The report as one screen for people: at most 30 lines of 100 columns; what does not fit is counted and is in the JSON.

peak     9.84 GiB   in backward at aten._log_softmax_backward_data (model.py:187)
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TextIO

import click

from memir.analysis.words import Unit, count, option, plural, shortened, shortened_end, small_bytes, wrapped
from memir.formulas import Spot, Stretch
from memir.ir.core import Program
from memir.report import Report, mesh_text, program_report, stages_text, verdict_text

WIDTH = 100
HEIGHT = 30
BAR = 24
MANY = 7  # phases that are named one by one at most: three micro-batches and the optimizer
SPARKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
KIND_NAMES = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "saved for backward",
    "temporary": "temporary",
    "workspace": "kernel workspace",
    "collective": "collectives",
    "kv_cache": "key-value cache",
}  # kinds are those of memir.ir.core.Kind; a saved tensor has the kind activation


@dataclass(frozen=True, slots=True)
class Text:
    """`color` styles for a terminal; `batch` and `seq` are the point for `emit`, a report has its own."""

    name: ClassVar[str] = "text"
    batch: int = 1
    seq: int = 2048
    color: bool = False

    def emit(self, program: Program, out: TextIO) -> None:
        """Write the report of a bare program. Errors as `build_report`."""
        out.write(self.render(program_report(program, self.batch, self.seq)))

    def render(self, report: Report) -> str:
        """The screen, ending in a newline."""
        return "\n".join(_Screen(report, self.color).lines()) + "\n"


class _Screen:
    def __init__(self, report: Report, color: bool) -> None:
        self.report = report
        self.unit = Unit.of(report.peak.requested)
        self.color = color

    def lines(self) -> list[str]:
        """The sections, the table of storages cut to the room that the others leave."""
        head = [*self.header(), "", *self.answer(), "", *self.breakdown()]
        tail = [*self.unused(), "", *self.formula(), *self.notes()]
        room = HEIGHT - len(head) - len(tail) - 1
        return [*head, *self.top(room), *tail]

    def style(self, text: str, *, bold: bool = False, dim: bool = False, fg: str | None = None) -> str:
        return click.style(text, bold=bold or None, dim=dim or None, fg=fg) if self.color else text

    def header(self) -> list[str]:
        subject, at = self.report.subject, ", ".join(f"{name}={value}" for name, value in self.report.symbols)
        title = subject.name or subject.target or "memory program"
        facts = []
        if subject.num_parameters is not None:
            trained = subject.num_trainable
            some = f" ({count(trained)} trained)" if trained is not None and trained != subject.num_parameters else ""
            facts.append(f"{count(subject.num_parameters)} parameters{some}")
        if subject.num_layers is not None:
            facts.append(plural(subject.num_layers, "layer"))
        options = dict(self.report.recipe)
        facts += [str(options[key]) for key in ("dtype", "optimizer") if options.get(key)]
        place = f" ({subject.source})" if subject.source else ""
        room = WIDTH - len(title) - len(place) - len(at) - 5
        line = f"{self.style(title, bold=True)}{place}   {shortened(', '.join(facts), max(room, 1))}"
        return [line.rstrip() + (f"   {at}" if at else "")]

    def answer(self) -> list[str]:
        report, number = self.report, self.unit.number
        peak = self.style(f"{self.unit.text(report.peak.requested):>12}", bold=True)
        lines = [*self.mesh(), f"  peak{peak}   {_spot(report.spot, WIDTH - 21)}"]
        phases = "   ".join(f"{name} {number(nbytes)}" for name, nbytes in _in_short(report))
        allocated = f"   allocated {number(report.peak.allocated)}" if report.peak.allocated != report.peak.requested else ""
        lines.append(f"  between steps {number(report.steady.requested)}   {phases}{allocated}"[:WIDTH].rstrip())
        if report.kernels:
            lines.append(f"  attention kernel {', '.join(report.kernels)}")
        return [*lines, *self.verdict(), *self.timeline()]

    def mesh(self) -> list[str]:
        """Whose step it is, where there are several ranks."""
        text = mesh_text(self.report)
        lines = [text] if text else []
        if self.report.stages:
            lines.append(stages_text(self.report, self.unit))
        return [f"  {shortened_end(line, WIDTH - 2)}" for line in lines]

    def verdict(self) -> list[str]:
        """Whether it fits the GPU that was named, and what of it is counted."""
        found = self.report.verdict
        if found is None:
            return []
        words = f"{found.answer} {shortened_end(found.gpu, 24)}"
        colors = {"fits": "green", "tight": "yellow"}
        answer = self.style(words, bold=True, fg=colors.get(found.answer, "red"))
        lines = [f"  {answer}   {shortened_end(verdict_text(found), WIDTH - len(words) - 5)}"]
        return lines + [f"    {line.strip()}" for line in wrapped("", found.failure_in_short, WIDTH - 4, 3) if line.strip()]

    def timeline(self) -> list[str]:
        phases = self.report.phases
        room = WIDTH - 2 - sum(len(phase.name) + 3 for phase in phases)
        if not phases or room < 8 * len(phases):
            return []
        total = sum(len(phase.samples) for phase in phases)
        parts = []
        for phase in phases:
            width = max(4, min(len(phase.samples), room * len(phase.samples) // total))
            line = sparkline(phase.samples, width, self.report.peak.requested)
            parts.append(f"{self.style(phase.name, dim=True)} {self.style(line, fg='cyan')}")
        return ["  " + "  ".join(parts)]

    def breakdown(self) -> list[str]:
        rows = [(kind, nbytes) for kind, nbytes in self.report.breakdown if self.unit.number(nbytes) != "0.00"]
        shown, rest = (rows, []) if len(rows) <= 6 else (rows[:5], rows[5:])
        lines = [self.style(f"  at the peak{'':37}{self.unit.name:>8}", dim=True)]
        whole = max(self.report.peak.requested, 1)
        for kind, nbytes in shown:
            drawn = self.style(f"{bar(nbytes / whole, BAR):{BAR}}", fg="green")
            lines.append(f"  {KIND_NAMES[kind]:20} {drawn} {self.unit.number(nbytes):>10}  {100 * nbytes / whole:3.0f} %")
        if rest:
            names = ", ".join(KIND_NAMES[kind] for kind, _ in rest)
            lines.append(f"  {names:45} {self.unit.number(sum(nbytes for _, nbytes in rest)):>10}")
        return lines

    def top(self, room: int) -> list[str]:
        groups = self.report.top
        if room < 3 or not groups:
            return []
        shown = groups[: min(room - 2, 8)]
        lines = ["", self.style(f"  largest there{self.unit.name:>7}  count  kind", dim=True)]
        for group in shown:
            where = "  ".join(filter(None, (group.op, group.module and f"@{group.module}", group.source)))
            left = f"  {self.unit.number(group.nbytes):>20} {group.count:>6}  {KIND_NAMES[group.kind]:18}"
            lines.append(f"{left} {shortened(where, WIDTH - len(left) - 1)}")
        return lines

    def unused(self) -> list[str]:
        groups = self.report.unused
        total, number = sum(g.nbytes for g in groups), sum(g.count for g in groups)
        if self.unit.number(total) == "0.00":
            return []
        first = groups[0]
        text = (
            f"  alive and never used again {self.unit.number(total)} in {plural(number, 'storage')}, held by {first.held_by}: "
        )
        where = " ".join(filter(None, (first.op or f"@{first.module}", first.source)))
        return [text + shortened(where, WIDTH - len(text))]

    def formula(self) -> list[str]:
        formulas = self.report.formulas
        valid = "valid for " + ", ".join(formulas.domain) if formulas.domain else ""
        if formulas.cases:
            return [shortened_end(f"  peak = {peak}   for {where}", WIDTH) for where, peak in formulas.cases] + self.borders()
        lines = textwrap.wrap(
            f"peak = {formulas.peak}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        if len(lines) > 3:
            lines = [f"  peak = Max of {len(formulas.regions)} polynomials (--format json)"]
        if len(lines[-1]) + len(valid) + 3 <= WIDTH:
            lines[-1] += f"   {valid}"
        else:
            lines.append(shortened_end(f"  {valid}", WIDTH))
        if len(formulas.regions) > 1:
            lines += self.borders()
        return lines + self.depth()

    def depth(self) -> list[str]:
        """The formula in the number of layers, if it fits into two lines."""
        by_depth = self.report.by_depth
        if by_depth is None:
            return []
        text = f"in {by_depth.symbol} layers: peak = {by_depth.peak}"
        lines = textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        return (
            lines
            if len(lines) < 3
            else [f"  in {by_depth.symbol} layers: peak = Max of several polynomials (--format formula)"]
        )

    def borders(self) -> list[str]:
        """The regions in words where each has some, else the stretches of S at the asked batch; at most four lines."""
        formulas = self.report.formulas
        along = {stretch.spot: stretch for stretch in formulas.stretches}
        if all(region.words for region in formulas.regions):
            rows = [(region.words, self.growth(along.get(region.spot)), region.spot) for region in formulas.regions]
        else:
            others = ", ".join(f"{name}={value}" for name, value in self.report.symbols if name != "S")
            at = f"at {others}: " if others else ""
            rows = [(at + stretch.words, self.growth(stretch), stretch.spot) for stretch in formulas.stretches]
        hidden = len(rows) - 4
        rows = rows[:4] if hidden <= 0 else rows[:3]
        first = max((len(row[0]) for row in rows), default=0)
        second = max((len(row[1]) for row in rows), default=0)
        lines = []
        for words, growth, spot in rows:
            left = f"    {words:{first}}   " + (f"{growth:{second}}   " if second else "")
            place = f" ({shortened(spot.source, 30)})" if spot.source else ""
            room = max(WIDTH - len(left) - len(spot.phase) - len(place) - 1, 12)
            lines.append(shortened_end(f"{left}{spot.phase} {shortened(spot.op, room)}{place}".rstrip(), WIDTH))
        return [*lines, f"    and {hidden + 1} more (--format json)"] if hidden > 0 else lines

    def growth(self, stretch: Stretch | None) -> str:
        """Bytes where the stretch begins and what one more token adds there."""
        if stretch is None:
            return ""
        more = f", then {small_bytes(stretch.slope)} a token" if stretch.slope else ""
        return self.unit.text(stretch.first) + more

    def notes(self) -> list[str]:
        """The recipe, what was assumed and what could not be proved, wrapped and cut."""
        report = self.report
        recipe = ", ".join(f"{key.replace('_', '-')} {option(value)}" for key, value in report.recipe)
        lines = wrapped("recipe: ", recipe, WIDTH, 3)
        lines += wrapped("assumed: ", "; ".join(report.assumptions), WIDTH, 3)
        return lines + [
            self.style(line, fg="yellow") for line in wrapped("inconclusive: ", "; ".join(report.inconclusive), WIDTH, 2)
        ]


def bar(share: float, width: int) -> str:
    """A bar of `width` columns at share 1, in eighths of a column; anything above nothing shows."""
    eighths = max(round(share * width * 8), 1) if share > 0 else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def sparkline(samples: Sequence[int], width: int, highest: int) -> str:
    """Samples in `width` columns or fewer, each the largest of its stretch, from 0 to `highest`."""
    width = min(width, len(samples))
    cuts = [i * len(samples) // width for i in range(width + 1)]
    tops = [max(samples[a:b]) for a, b in pairwise(cuts)]
    return "".join(SPARKS[min(top * len(SPARKS) // max(highest, 1), len(SPARKS) - 1)] for top in tops)


def _in_short(report: Report) -> list[tuple[str, int]]:
    """The phases and their peaks; of many, those of one kind together: all forwards, all backwards."""
    phases = [(phase.name, phase.requested) for phase in report.phases]
    if len(phases) <= MANY:
        return phases
    most: dict[str, int] = {}
    for name, nbytes in phases:
        kind = name.rpartition(".")[2]
        most[kind] = max(nbytes, most.get(kind, 0))
    return list(most.items())


def _spot(spot: Spot, room: int) -> str:
    if not spot.op:
        return shortened_end("at the start of the step", room)
    place = ", ".join(filter(None, (spot.source, spot.module)))
    head = f"in {spot.phase} at {spot.op}"
    return shortened_end(head + (f" ({shortened(place, max(room - len(head) - 3, 8))})" if place else ""), room)
