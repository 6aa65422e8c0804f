"""A difference in each of the formats; without one (the base has no such target) what the head takes."""

from __future__ import annotations

import json

from memir.analysis.words import Unit
from memir.diff.compare import Difference
from memir.diff.markdown import to_markdown
from memir.diff.side import Side
from memir.diff.text import SCHEMA_VERSION, percent, signed, to_data, to_text
from memir.findings.finding import CHECK_RULES, IMPROVED, INCONCLUSIVE, ORDER, REGRESSION, Finding
from memir.findings.github import to_github
from memir.findings.sarif import to_sarif
from memir.ir.symbolic import formula_text


def render(found: Difference | None, head: Side, form: str) -> str:
    """The text in a format: text, json, markdown, github or sarif."""
    if form == "github":
        return to_github(findings(found)) if found else ""
    if form == "sarif":
        return to_sarif(findings(found) if found else (), CHECK_RULES)
    if found is None:
        return _added(head, form)
    if form == "json":
        return json.dumps(to_data(found), indent=2, ensure_ascii=False) + "\n"
    return to_markdown(found) if form == "markdown" else to_text(found)


def _added(head: Side, form: str) -> str:
    nbytes, _ = head.formula.evaluate(head.point)
    point = ", ".join(f"{name}={value}" for name, value in head.point.items())
    if form == "json":
        data = {"schema_version": SCHEMA_VERSION, "quantity": "requested", "head": head.label, "symbols": dict(head.point)}
        return json.dumps({**data, "before_bytes": None, "after_bytes": nbytes}, indent=2, ensure_ascii=False) + "\n"
    takes = f"{head.name} takes {Unit.of(nbytes).text(nbytes)} at its peak ({point})"
    return f"new in {head.label}: {takes}; the base has no such file\n"


def findings(found: Difference) -> tuple[Finding, ...]:
    """The difference as findings on the changed lines: a new order, then the bytes."""
    unit = Unit.of(max(found.before, found.after))
    file, line = _place(found)
    results = [
        Finding(
            ORDER,
            "warning",
            f"{order.words}, {unit.text(order.nbytes)} at {_point(found)}",
            file,
            line,
            order.nbytes,
            order.term,
            "",
        )
        for order in found.orders
        if order.is_new
    ]
    if found.nbytes:
        word = "grew" if found.nbytes > 0 else "fell"
        change = f"{signed(unit, found.nbytes)} {unit.name} ({percent(found)})"
        text = f"the peak {word} from {unit.text(found.before)} to {unit.text(found.after)}, {change} at {_point(found)}"
        text += f"; formula {formula_text(found.delta)}"
        rule, level = (REGRESSION, "warning") if found.nbytes > 0 else (IMPROVED, "note")
        results.append(Finding(rule, level, text, file, line, found.nbytes, formula_text(found.delta)))
    results += [Finding(INCONCLUSIVE, "warning", reason, file, line) for reason in found.inconclusive]
    return tuple(results)


def _point(found: Difference) -> str:
    return ", ".join(f"{name}={value}" for name, value in found.point)


def _place(found: Difference) -> tuple[str, int]:
    """The line that annotations sit on: the likeliest changed one, or else the peak's."""
    if found.blames:
        return found.blames[0].file, found.blames[0].line
    file, _, line = found.spot_after.source.rpartition(":")
    return (file, int(line)) if line.isdigit() else ("", 0)
