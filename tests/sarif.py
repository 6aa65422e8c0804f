"""SARIF 2.1.0 as a program that reads it takes it: the object model of the specification, nothing beyond it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from sarif_pydantic import Sarif


def results(text: str) -> list[dict[str, Any]]:
    """The results of the one run of a log; pydantic's ValidationError, or an AssertionError, where it is no SARIF 2.1.0."""
    data = json.loads(text)
    log = Sarif.model_validate(data)
    assert data["version"] == "2.1.0"
    assert "$schema" in data
    _known(log, data)
    (run,) = data["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == sorted(set(rules))
    found: list[dict[str, Any]] = run["results"]
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in found)
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in found]
    assert len(set(prints)) == len(prints)
    return found


def _known(model: Any, data: Any) -> None:
    """Every property is one of the specification's: it allows no others (but in property bags)."""
    if isinstance(model, list):
        for one, item in zip(model, data, strict=True):
            _known(one, item)
    elif isinstance(model, BaseModel) and type(model).__name__ != "PropertyBag":
        names = {field.alias or name: name for name, field in type(model).model_fields.items()}
        for name, item in data.items():
            assert name in names, f"{type(model).__name__} has no {name}"
            _known(getattr(model, names[name]), item)
