"""A difference in each of the formats; without one (the base has no such target) what the head takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memir.analysis.words import Unit
from memir.diff.compare import Difference
from memir.diff.markdown import to_markdown
from memir.diff.side import Side
from memir.diff.text import SCHEMA_VERSION, percent, signed, to_data, to_text
from memir.errors import MemirError
from memir.findings.finding import CHECK_RULES, IMPROVED, INCONCLUSIVE, ORDER, REGRESSION, Finding
from memir.findings.github import to_github
from memir.findings.sarif import to_sarif
from memir.ir.symbolic import formula_text


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a diff: its difference; or only the head, where the base has no such target; or why there is neither."""

    name: str  # of the scenario; "" for a target
    difference: Difference | None = None
    head: Side | None = None
    error: MemirError | None = None

    @property
    def is_proven(self) -> bool:
        """Whether there is an answer, without a doubt about it."""
        doubts = self.difference.inconclusive if self.difference else self.head.inconclusive if self.head else ("error",)
        return not doubts


def render(items: Sequence[Item], form: str) -> str:
    """All items in a format: text, json, markdown, github or sarif."""
    if form in ("github", "sarif"):
        found = [finding for item in items for finding in _findings(item)]
        return to_github(found) if form == "github" else to_sarif(found, CHECK_RULES)
    if form == "json":
        data: Any = _data(items[0]) if len(items) == 1 and not items[0].name else {i.name: _data(i) for i in items}
        if len(items) > 1 or items[0].name:
            data = {"schema_version": SCHEMA_VERSION, "scenarios": data}
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    parts = []
    for item in items:
        head = "" if not item.name else f"### {item.name}\n\n" if form == "markdown" else f"{item.name}: "
        parts.append(head + _plain(item, form))
    return "\n".join(parts)


def _plain(item: Item, form: str) -> str:
    if item.error is not None:
        return f"inconclusive: {item.error}\n"
    if item.difference is None:
        return _added(item) + "\n"
    return to_markdown(item.difference) if form == "markdown" else to_text(item.difference)


def _data(item: Item) -> dict[str, Any]:
    if item.difference is not None:
        return to_data(item.difference)
    data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "quantity": "requested"}
    if item.head is None:
        return {**data, "inconclusive": [str(item.error)]}
    nbytes, _ = item.head.formula.evaluate(item.head.point)
    where = {"head": item.head.label, "symbols": dict(item.head.point)}
    return {**data, **where, "before_bytes": None, "after_bytes": nbytes}


def _added(item: Item) -> str:
    assert item.head is not None
    nbytes, _ = item.head.formula.evaluate(item.head.point)
    point = ", ".join(f"{name}={value}" for name, value in item.head.point.items())
    takes = f"{item.head.name} takes {Unit.of(nbytes).text(nbytes)} at its peak ({point})"
    return f"new in {item.head.label}: {takes}; the base has no such file"


def _findings(item: Item) -> tuple[Finding, ...]:
    if item.error is not None:
        text = f"{item.name}: {item.error}" if item.name else str(item.error)
        return (Finding(INCONCLUSIVE, "warning", " ".join(text.split())),)
    found = findings(item.difference) if item.difference is not None else ()
    return tuple(replace(f, message=f"{item.name}: {f.message}", module=item.name) for f in found) if item.name else found


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
