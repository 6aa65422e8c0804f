"""The baseline: what each scenario took when somebody said that this is how it should be. Committed; sorted, without times or
paths of a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memir.check.facts import Facts
from memir.check.scenario import Scenario
from memir.diff.orders import Powers
from memir.errors import UsageError
from memir.recipe import Recipe

SCHEMA_VERSION = 1
VERSIONED = ("torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Entry:
    """One scenario: its question in words, and the answer. Bytes are requested bytes."""

    question: tuple[tuple[str, str], ...]
    nbytes: int
    formula: str
    here: str
    orders: tuple[Powers, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Baseline:
    """All entries by scenario, and the versions that they were made with."""

    entries: Mapping[str, Entry]
    versions: Mapping[str, str]


def question(scenario: Scenario) -> tuple[tuple[str, str], ...]:
    """What decides a scenario's number besides the code: target, batch, seq, config values, recipe where it is no default."""
    found = [("target", scenario.target)]
    found += [(name, str(value)) for name, value in (("batch", scenario.batch), ("seq", scenario.seq)) if value is not None]
    found += [(f"set.{name}", value) for name, value in sorted(scenario.sets.items())]
    found += [("inputs", scenario.inputs)] if scenario.inputs else []
    found += [("parallel", scenario.parallel)] if scenario.parallel else []
    default = Recipe()
    for field in fields(Recipe):
        value = getattr(scenario.recipe, field.name)
        if value != getattr(default, field.name):
            found.append(("device" if field.name == "target" else field.name, str(value)))
    return tuple(found)


def entry(scenario: Scenario, found: Facts) -> Entry:
    """What the baseline keeps of a scenario."""
    place = " ".join(filter(None, (found.phase, found.op, found.module)))
    return Entry(question(scenario), found.requested, found.formula, found.here, found.orders, place)


def read(path: Path, shown: str) -> Baseline | None:
    """The baseline in a file; None if there is none. UsageError: the file is no baseline."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{shown} cannot be read: {error}", hint="memir check --update-baseline  writes it anew") from None
    try:
        if data["schema_version"] != SCHEMA_VERSION:
            raise UsageError(f"{shown} is of version {data['schema_version']}, and this memir writes {SCHEMA_VERSION}")
        entries = {str(name): _entry(item) for name, item in data["scenarios"].items()}
        return Baseline(entries, {str(k): str(v) for k, v in data["versions"].items()})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        hint = "memir check --update-baseline  writes it anew"
        raise UsageError(f"{shown} is no baseline of memir: {type(error).__name__}: {error}", hint=hint) from None


def _entry(data: Any) -> Entry:
    return Entry(
        question=tuple((str(k), str(v)) for k, v in data["question"].items()),
        nbytes=int(data["peak_bytes"]),
        formula=str(data["formula"]),
        here=str(data["formula_here"]),
        orders=tuple(tuple((str(k), int(v)) for k, v in sorted(item.items())) for item in data["orders"]),
        place=str(data["place"]),
    )


def to_text(found: Baseline) -> str:
    """The file's text: the same for the same answers."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "scenarios": {
            name: {
                "question": dict(item.question),
                "peak_bytes": item.nbytes,
                "formula": item.formula,
                "formula_here": item.here,
                "orders": [dict(order) for order in item.orders],
                "place": item.place,
            }
            for name, item in sorted(found.entries.items())
        },
        "versions": dict(sorted(found.versions.items())),
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def updated(old: Baseline | None, new: Mapping[str, Entry], known: frozenset[str], versions: Mapping[str, str]) -> Baseline:
    """The baseline with new entries; those of scenarios that are no longer known fall away."""
    kept = {} if old is None else {name: item for name, item in old.entries.items() if name in known}
    return Baseline({**kept, **new}, versions)
