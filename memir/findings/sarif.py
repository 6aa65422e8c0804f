"""Findings as SARIF 2.1.0 (OASIS, Static Analysis Results Interchange Format), which code-scanning services read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from memir import __version__
from memir.findings.finding import Finding, Rule

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(findings: Iterable[Finding], rules: Sequence[Rule]) -> str:
    """A log with one run; the rules of all findings must be among `rules`."""
    order = sorted(rules, key=lambda rule: rule.code)
    index = {rule.code: number for number, rule in enumerate(order)}
    seen: dict[str, int] = {}
    run = {
        "tool": {
            "driver": {
                "name": "memir",
                "version": __version__,
                "rules": [_rule(rule) for rule in order],
            }
        },
        "results": [_result(found, index, seen) for found in findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    name = "".join(word.capitalize() for word in rule.name.split("-"))
    return {
        "id": rule.code,
        "name": name,
        "shortDescription": {"text": rule.text},
        "help": {"text": f"See {rule.page} in memir's documentation."},
    }


def _result(found: Finding, index: dict[str, int], seen: dict[str, int]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": found.rule.code,
        "ruleIndex": index[found.rule.code],
        "level": found.level,
        "message": {"text": found.message},
    }
    if found.file:
        location: dict[str, Any] = {"artifactLocation": {"uri": quote(found.file), "uriBaseId": "%SRCROOT%"}}
        if found.line:
            location["region"] = {"startLine": found.line}
        result["locations"] = [{"physicalLocation": location}]
    # the same for the same finding when lines above it move: rule, file and module, and a counter where those are alike
    plain = "\n".join((found.rule.code, found.file, found.module or found.message))
    seen[plain] = seen.get(plain, 0) + 1
    digest = hashlib.sha256(plain.encode()).hexdigest()[:16]
    result["partialFingerprints"] = {"primaryLocationLineHash": f"{digest}:{seen[plain]}"}
    result["properties"] = {"bytes": found.nbytes, **({"formula": found.formula} if found.formula else {})}
    return result
