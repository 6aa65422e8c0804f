"""What a check found, in each of the formats."""

from __future__ import annotations

import json
import os
from typing import Any

from memir.analysis.words import Unit, wrapped
from memir.check.judge import GREW, OK, OVER, SKIP, STATUSES, UNKNOWN, Outcome
from memir.check.run import Checked
from memir.diff.markdown import cell, code
from memir.diff.orders import product_text
from memir.findings.finding import CHECK_RULES, Finding
from memir.findings.github import to_github
from memir.findings.sarif import to_sarif

SCHEMA_VERSION = 1
WIDTH = 100
_LEVELS = {OVER: "error", GREW: "error", UNKNOWN: "warning", SKIP: "warning"}
_MARKS = {OK: "ok", OVER: "OVER", GREW: "GREW", UNKNOWN: "??", SKIP: "SKIPPED"}


def render(found: Checked, form: str) -> str:
    """The text in a format: text, json, markdown, github or sarif."""
    if form == "github":
        return to_github(findings(found))
    if form == "sarif":
        return to_sarif(findings(found), CHECK_RULES)
    if form == "json":
        return json.dumps(to_data(found), indent=2, ensure_ascii=False) + "\n"
    return to_markdown(found) if form == "markdown" else to_text(found)


def summary(found: Checked) -> str:
    """`4 scenarios: 1 over budget, 1 skipped, 2 ok`."""
    counts = [(status, sum(o.status == status for o in found.outcomes)) for status in STATUSES]
    number = len(found.outcomes)
    parts = ", ".join(f"{count} {status}" for status, count in counts if count)
    return f"{number} scenario{'' if number == 1 else 's'}: {parts}" if number else "no scenarios: nothing was checked"


def to_text(found: Checked) -> str:
    """A line for each scenario, the reasons under it, and the summary."""
    width = max((len(o.scenario.name) for o in found.outcomes), default=0)
    lines = []
    for outcome in found.outcomes:
        lines.append(f"{_MARKS[outcome.status]:<8} {outcome.scenario.name:<{width}}  {_numbers(outcome)}".rstrip())
        for reason in outcome.reasons:
            lines += _indented(f"{reason.rule.name}: {reason.text}")
        if outcome.delta and any(reason.status == GREW for reason in outcome.reasons):
            lines += _indented(f"formula at this point: {_sign(outcome.delta)}")
        if outcome.facts is not None and any(reason.status in (GREW, OVER) for reason in outcome.reasons):
            lines += _indented(f"the peak is {_place(outcome)}")
        for note in outcome.notes:
            lines += _indented(note)
    for note in _version_notes(found):
        lines += wrapped("", note, WIDTH, 3)
    return "\n".join([*lines, *([""] if lines else []), summary(found)]) + "\n"


def _indented(text: str) -> list[str]:
    return ["       " + line for line in wrapped("", text, WIDTH - 7, 6)]


def _sign(text: str) -> str:
    return text if text.startswith("-") else f"+{text}"


def _numbers(outcome: Outcome) -> str:
    facts = outcome.facts
    if facts is None:
        return ""
    unit = Unit.of(facts.requested)
    point = ", ".join(f"{name}={value}" for name, value in facts.point)
    text = f"{unit.text(facts.requested):>12}  {point}"
    if outcome.before is not None:
        more = facts.requested - outcome.before
        text += "  as in the baseline" if not more else f"  {more:+,} bytes"
    return text


def _place(outcome: Outcome) -> str:
    facts = outcome.facts
    assert facts is not None
    if not facts.op:
        return "at the step's start"
    return f"in {facts.phase} at {facts.op}" + (f" ({facts.source})" if facts.source else "")


def _version_notes(found: Checked) -> list[str]:
    if found.baseline is None:
        return []
    now = found.versions
    changed = [f"{n} {v}, now {now[n]}" for n, v in sorted(found.baseline.versions.items()) if n in now and now[n] != v]
    return [f"the baseline was made with {'; '.join(changed)}: other versions may keep other tensors"] if changed else []


def to_data(found: Checked) -> dict[str, Any]:
    """The outcomes as JSON data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": found.exit_code,
        "scenarios": [_data(outcome) for outcome in found.outcomes],
        "versions": dict(sorted(found.versions.items())),
        "notes": _version_notes(found),
    }


def _data(outcome: Outcome) -> dict[str, Any]:
    facts = outcome.facts
    data: dict[str, Any] = {
        "name": outcome.scenario.name,
        "target": outcome.scenario.target,
        "status": outcome.status,
        "reasons": [{"code": r.rule.code, "name": r.rule.name, "status": r.status, "text": r.text} for r in outcome.reasons],
        "notes": list(outcome.notes),
    }
    if facts is not None:
        data |= {
            "symbols": dict(facts.point),
            "requested_bytes": facts.requested,
            "allocated_bytes": facts.allocated,
            "baseline_bytes": outcome.before,
            "delta_bytes": None if outcome.before is None else facts.requested - outcome.before,
            "delta_formula": outcome.delta or None,
            "formula": facts.formula,
            "orders": [product_text(order) for order in facts.orders],
            "place": {"phase": facts.phase, "op": facts.op, "module": facts.module, "source": facts.source},
            "saved_per_layer_bytes": facts.saved_per_layer,
        }
    return data


def to_markdown(found: Checked) -> str:
    """One table and collapsed details, for a comment that is kept up to date."""
    rows = ["| scenario | base | head | change | budget | status |", "|---|---:|---:|---:|---|---|"]
    details = []
    for outcome in found.outcomes:
        facts, name = outcome.facts, f"`{code(outcome.scenario.name)}`"
        bad = outcome.status != OK
        status = f"**{outcome.status}**" if bad else outcome.status
        if facts is None:
            rows.append(f"| {name} | | | | | {status} |")
        else:
            unit = Unit.of(facts.requested)
            before = "new" if outcome.before is None else unit.text(outcome.before)
            more = facts.requested - (facts.requested if outcome.before is None else outcome.before)
            sign = "" if not more else f"{'-' if more < 0 else '+'}{unit.text(abs(more))}"
            share = f" ({100 * more / outcome.before:+.1f} %)" if more and outcome.before else ""
            rows.append(f"| {name} | {before} | {unit.text(facts.requested)} | {sign}{share} | {_budget(outcome)} | {status} |")
        lines = [f"- {reason.rule.name}: {cell(reason.text)}" for reason in outcome.reasons]
        lines += [f"- formula at this point: `{_sign(code(outcome.delta))}`"] if outcome.delta else []
        lines += [f"- the peak is {cell(_place(outcome))}"] if facts is not None and bad else []
        lines += [f"- {cell(note)}" for note in outcome.notes]
        if lines:
            details.append(f"{name}\n\n" + "\n".join(lines))
    parts = [summary(found), "\n".join(rows)] if found.outcomes else [summary(found)]
    parts += [cell(note) for note in _version_notes(found)]
    if details:
        parts.append("<details><summary>Reasons</summary>\n\n" + "\n\n".join(details) + "\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _budget(outcome: Outcome) -> str:
    budgets = outcome.scenario.budgets
    words = []
    if budgets.max is not None:
        words.append(f"max {Unit.of(budgets.max).text(budgets.max)}")
    if budgets.max_increase is not None:
        words.append(f"+{budgets.max_increase.text}")
    if budgets.max_order is not None:
        words.append(f"`{budgets.max_order.text(('B', 'S'))}`")
    if budgets.fits is not None:
        words.append(f"fits {budgets.fits.name}")
    return cell(", ".join(words))


def findings(found: Checked) -> tuple[Finding, ...]:
    """A finding for each reason, at the peak's line or else at the scenario's."""
    results = []
    for outcome in found.outcomes:
        file, line = _where(outcome, found)
        facts = outcome.facts
        for reason in outcome.reasons:
            text = f"{outcome.scenario.name}: {reason.text}"
            nbytes, formula = (facts.requested, facts.formula) if facts else (0, "")
            results.append(
                Finding(reason.rule, _LEVELS[reason.status], text, file, line, nbytes, formula, outcome.scenario.name)
            )
    return tuple(results)


def _where(outcome: Outcome, found: Checked) -> tuple[str, int]:
    """The peak's line if it lies in the folder of the configuration, else the scenario's there; from the working directory."""
    here = os.path.relpath(found.config.folder)
    if outcome.facts is not None:
        file, _, line = outcome.facts.source.rpartition(":")
        if line.isdigit() and (found.config.folder / file).is_file():
            return os.path.normpath(os.path.join(here, file)).replace(os.sep, "/"), int(line)
    name = os.path.normpath(os.path.join(here, found.config.path.name)).replace(os.sep, "/")
    return name, outcome.scenario.line
