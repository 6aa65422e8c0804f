"""Findings as GitHub's workflow commands, which become annotations on the changed lines.

`::error file=model.py,line=42,title=memir: peak-regression (MEM002)::the peak grew ...`
"""

from __future__ import annotations

from collections.abc import Iterable

from memir.findings.finding import Finding

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def to_github(findings: Iterable[Finding]) -> str:
    """A command for each finding, in their order; "" without any."""
    lines = []
    for found in findings:
        place = [f"file={_property(found.file)}"] if found.file else []
        place += [f"line={found.line}"] if found.file and found.line else []
        title = f"title={_property(f'memir: {found.rule.name} ({found.rule.code})')}"
        lines.append(f"::{_LEVELS[found.level]} {','.join([*place, title])}::{_data(found.message)}\n")
    return "".join(lines)


def _data(text: str) -> str:
    """As GitHub's runner reads a command's message (actions/toolkit, core/src/command.ts, escapeData)."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """As it reads a property (escapeProperty in the same file)."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
