"""Findings as GitHub's commands and as SARIF."""

from __future__ import annotations

import json

import pytest

from memir.findings.finding import BUDGET, CHECK_RULES, REGRESSION, Finding
from memir.findings.github import to_github
from memir.findings.sarif import to_sarif
from memir.lint.rules import RULES
from tests.sarif import results

FOUND = (
    Finding(REGRESSION, "error", "grew 50 %\nby much", "a b/m,o:del é.py", 7, 1024, "16*B*S", "layers.*"),
    Finding(BUDGET, "warning", "over", "memir.toml"),
    Finding(BUDGET, "note", "no place"),
)


def test_commands_are_escaped_as_the_runner_reads_them() -> None:
    first, second, third = to_github(FOUND).splitlines()
    assert first == ("::error file=a b/m%2Co%3Adel é.py,line=7,title=memir%3A peak-regression (MEM002)::grew 50 %25%0Aby much")
    assert second == "::warning file=memir.toml,title=memir%3A budget-exceeded (MEM001)::over"
    assert third == "::notice title=memir%3A budget-exceeded (MEM001)::no place"
    assert to_github(()) == ""


def test_a_log_is_sarif() -> None:
    found = results(to_sarif(FOUND, CHECK_RULES))
    assert [result["level"] for result in found] == ["error", "warning", "note"]
    place = found[0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "a%20b/m%2Co%3Adel%20%C3%A9.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 7}
    assert found[0]["properties"] == {"bytes": 1024, "formula": "16*B*S"}
    assert results(to_sarif((), CHECK_RULES)) == []


def test_a_fingerprint_stays_when_lines_above_move_and_tells_equal_findings_apart() -> None:
    moved = Finding(REGRESSION, "error", "grew", "m.py", 8, module="a")
    first, second = (results(to_sarif(found, CHECK_RULES)) for found in ((moved,), (moved, moved)))
    assert first[0]["partialFingerprints"] == second[0]["partialFingerprints"] != second[1]["partialFingerprints"]


def test_what_is_no_sarif_is_refused() -> None:
    for broken in ({"level": "bad"}, {"locations": 3}, {"nonsense": 1}):
        data = json.loads(to_sarif(FOUND, CHECK_RULES))
        data["runs"][0]["results"][0] |= broken
        with pytest.raises((ValueError, AssertionError)):
            results(json.dumps(data))


def test_codes_and_names_are_unique() -> None:
    rules = (*CHECK_RULES, *RULES)
    assert len({rule.code for rule in rules}) == len({rule.name for rule in rules}) == len(rules)
