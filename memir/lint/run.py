"""All rules on a step: what each place costs, which of them would lower the peak, and in every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memir.analysis.words import Unit
from memir.findings.finding import Finding
from memir.findings.github import to_github
from memir.findings.sarif import to_sarif
from memir.ir.symbolic import formula_text
from memir.lint.detect import DETECTORS, is_silenced
from memir.lint.rules import CHECKPOINT, RULES
from memir.lint.step import LintStep

SCHEMA_VERSION = 1
BLOCK = 512  # bytes; the CUDA allocator gives no less (kMinBlockSize), and scalars of a few bytes are no habit


@dataclass(frozen=True, slots=True)
class Linted:
    """A finding, the bytes that the peak would be lower without it, and how many storages it is about."""

    finding: Finding
    lowers: int
    count: int


def lint(step: LintStep, read_line: Callable[[str, int], str], *, everything: bool = False) -> tuple[Linted, ...]:
    """The findings that lower the peak, or all, the most rewarding first. `read_line` gives a line of a file as shown."""
    found: list[Linted] = []
    unit = Unit.of(step.peak)
    for rule, detect in DETECTORS:
        for (module, source), cuts in detect(step):
            file, _, number = source.rpartition(":")
            line = int(number) if number.isdigit() else 0
            if line and is_silenced(read_line(file, line), rule):
                continue
            lowers = step.peak - step.without(cuts)
            if lowers < BLOCK and not everything:
                continue
            here = step.at_peak(cuts)
            nbytes = here.evaluate(step.side.point) if here.terms else 0
            many = f" ({len(cuts)} storages)" if len(cuts) > 1 else ""
            what = f"{rule.text[:-1]}: {module or 'the step'}{many}"
            gain = f"without it the peak is {unit.text(lowers)} lower" if lowers > 0 else "without it the peak stays"
            text = f"{what}, {unit.text(nbytes)} at the peak; {gain}"
            finding = Finding(rule, "warning", text, file, line, nbytes, formula_text(here), module)
            found.append(Linted(finding, lowers, len(cuts)))
    if step.unrecomputed is not None and step.unrecomputed <= step.peak:
        text = f"{CHECKPOINT.text[:-1]}: the peak is {unit.text(step.unrecomputed)} without it"
        found.append(Linted(Finding(CHECKPOINT, "warning", text), step.peak - step.unrecomputed, 1))
    return tuple(sorted(found, key=lambda item: (-item.lowers, *item.finding.key)))


def reader(folder: Path) -> Callable[[str, int], str]:
    """Reads lines of files below a folder; "" for others."""
    known: dict[str, list[str]] = {}

    def read(file: str, line: int) -> str:
        if file not in known:
            try:
                known[file] = (folder / file).read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                known[file] = []
        lines = known[file]
        return lines[line - 1] if 0 < line <= len(lines) else ""

    return read


def render(found: Sequence[Linted], step: LintStep, form: str, folder: Path) -> str:
    """The findings in a format: text, json, markdown, github or sarif. Annotations name files of `folder` only."""
    if form in ("github", "sarif"):
        plain = [_local(item.finding, folder) for item in found]
        return to_github(plain) if form == "github" else to_sarif(plain, RULES)
    if form == "json":
        return json.dumps(_data(found, step), indent=2, ensure_ascii=False) + "\n"
    return _markdown(found, step) if form == "markdown" else _text(found, step)


def _local(finding: Finding, folder: Path) -> Finding:
    if not finding.file or (folder / finding.file).is_file():
        return finding
    text = f"{finding.message} ({finding.file}:{finding.line})"
    return Finding(finding.rule, finding.level, text, "", 0, finding.nbytes, finding.formula, finding.module)


def _head(step: LintStep) -> str:
    point = ", ".join(f"{name}={value}" for name, value in step.side.point.items())
    return f"{step.side.name or step.side.label}   {point}   peak {Unit.of(step.peak).text(step.peak)}"


def _text(found: Sequence[Linted], step: LintStep) -> str:
    lines = [_head(step), ""]
    for item in found:
        finding = item.finding
        place = f"{finding.file}:{finding.line}: " if finding.line else ""
        lines.append(f"{place}{finding.rule.code} {finding.rule.name}  {finding.message}")
        if finding.formula not in ("", "0"):
            lines.append(f"    {finding.formula} bytes; {finding.rule.page}")
    lines.append(f"{len(found)} finding{'' if len(found) == 1 else 's'}" if found else "nothing found")
    return "\n".join(lines) + "\n"


def _data(found: Sequence[Linted], step: LintStep) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "quantity": "requested",
        "symbols": dict(step.side.point),
        "peak_bytes": step.peak,
        "findings": [
            {
                "code": item.finding.rule.code,
                "name": item.finding.rule.name,
                "file": item.finding.file,
                "line": item.finding.line,
                "module": item.finding.module,
                "bytes": item.finding.nbytes,
                "formula": item.finding.formula,
                "lowers_peak_by_bytes": item.lowers,
                "storages": item.count,
                "message": item.finding.message,
            }
            for item in found
        ],
    }


def _markdown(found: Sequence[Linted], step: LintStep) -> str:
    lines = [_head(step).replace("|", "\\|"), ""]
    if not found:
        return "\n".join([*lines, "Nothing found."]) + "\n"
    unit = Unit.of(step.peak)
    lines += [f"| finding | place | {unit.name} at the peak | peak lower by |", "|---|---|---:|---:|"]
    for item in found:
        place = f"`{item.finding.file}:{item.finding.line}`" if item.finding.line else f"`{item.finding.module}`"
        numbers = f"{unit.number(item.finding.nbytes)} | {unit.number(max(0, item.lowers))}"
        lines.append(f"| {item.finding.rule.name} ({item.finding.rule.code}) | {place} | {numbers} |")
    return "\n".join(lines) + "\n"
