"""Well-known decoder models by name: the facts of their public configurations, without weights and without a network.

The facts are in presets.json, one record per model: the fields of the Hugging Face configuration that determine shapes,
tying, biases, activations, dropout, layer types, windows, position encoding and routing, and the published parameter count.
tests/test_presets.py builds every one on the meta device and compares the count. Imports neither torch nor transformers.
"""

from __future__ import annotations

import copy
import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """One model. `config` is what `AutoConfig.for_model(**config)` takes, and is the caller's own copy."""

    name: str  # lower case, as typed: "llama-3.1-8b"
    hf_id: str  # the id of the model's repository: "meta-llama/Llama-3.1-8B"
    aliases: tuple[str, ...]  # further ids and names with this very architecture
    config: dict[str, Any]  # includes model_type and architectures
    params: int  # the published parameter count: exact, or rounded to `digits` significant digits
    digits: int | None  # significant digits of a rounded figure; None: `params` is exact
    params_source: str  # who publishes `params`
    source: str  # where the configuration's fields are from

    @property
    def params_exact(self) -> bool:
        """Whether `params` is the exact count, not a rounded figure."""
        return self.digits is None

    def agrees(self, count: int) -> bool:
        """Whether `count` parameters is what is published: equal, or within the last digit of a rounded figure."""
        if self.digits is None:
            return count == self.params
        return abs(count - self.params) <= 10 ** (len(str(self.params)) - self.digits)


@cache
def _presets() -> dict[str, Preset]:
    records = json.loads(resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8"))
    return {name: _preset(name, record) for name, record in records.items()}


def _preset(name: str, record: dict[str, Any]) -> Preset:
    published = record["published"]
    first, *others = record["hf"]
    return Preset(
        name=name,
        hf_id=first,
        aliases=tuple(others),
        config=record["config"],
        params=published["params"],
        digits=published.get("digits"),
        params_source=published["source"],
        source=record["source"],
    )


def _copy(preset: Preset) -> Preset:
    # dataclasses.replace would do, but the nested lists must be the caller's own too
    return copy.deepcopy(preset)


@cache
def _index() -> dict[str, str]:
    """Every lower-case way to write a preset's name -> the name. Names win over ids, ids over their last parts."""
    index: dict[str, str] = {}
    for name, preset in _presets().items():
        for hf_id in (preset.hf_id, *preset.aliases):
            index.setdefault(hf_id.rpartition("/")[2].lower(), name)
    for name, preset in _presets().items():
        index.update({hf_id.lower(): name for hf_id in (preset.hf_id, *preset.aliases)})
    index.update({name: name for name in _presets()})
    return index


def names() -> tuple[str, ...]:
    """All preset names, sorted as in the data file."""
    return tuple(_presets())


def get(name: str) -> Preset | None:
    """The preset called `name`: its name, a Hugging Face id or the id's last part, in any case. None if there is none."""
    key = _index().get(name.strip().lower())
    return None if key is None else _copy(_presets()[key])


def nearest(name: str, n: int = 3) -> list[str]:
    """Up to `n` preset names that are spelled most like `name`, best first; empty if nothing is near."""
    found: list[str] = []
    for key in difflib.get_close_matches(name.strip().lower(), list(_index()), n=4 * n, cutoff=0.5):
        if _index()[key] not in found:
            found.append(_index()[key])
    return found[:n]


def search(word: str) -> list[Preset]:
    """The presets whose name, id, alias or model type contains `word`, in any case; all of them for an empty word."""
    needle = word.strip().lower()
    return [
        _copy(preset)
        for preset in _presets().values()
        if any(needle in text.lower() for text in (preset.name, preset.hf_id, *preset.aliases, preset.config["model_type"]))
    ]
