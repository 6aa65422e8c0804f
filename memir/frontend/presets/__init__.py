"""Well-known decoder models by name: the facts of their public configurations, without weights and without a network.

The facts are in presets.json, one record a model, in the form of the Hugging Face config.json that the model was published
with: what determines shapes, tying, biases, activations, dropout, windows, position encoding and routing, and the published
parameter count. tests/test_presets.py builds every one on the meta device and compares the count. No torch, no transformers.
"""

from __future__ import annotations

import copy
import difflib
import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """One model. `config` has the fields of a config.json, model_type and architectures included, and is the caller's own."""

    name: str  # lower case, as typed: "llama-3.1-8b"
    hf_id: str  # the id of the model's repository: "meta-llama/Llama-3.1-8B"
    aliases: tuple[str, ...]  # further ids, and names, of models of these very shapes; their longest sequence may differ
    config: dict[str, Any]
    params: int  # the published number of parameters; a tied matrix counts once
    digits: int | None  # significant digits of `params` where the publisher rounded it; None: it is exact
    params_source: str  # who publishes `params`, and what was subtracted
    source: str  # where `config` is from

    @property
    def params_exact(self) -> bool:
        """Whether `params` is the exact count, not a rounded figure."""
        return self.digits is None

    def agrees(self, count: int) -> bool:
        """Whether `count` parameters are what is published: equal, or within one unit of a rounded figure's last digit."""
        if self.digits is None:
            return count == self.params
        unit: int = 10 ** (len(str(self.params)) - self.digits)
        return abs(count - self.params) < unit


@cache
def _presets() -> dict[str, Preset]:
    """The data file by name, in its order. Shared: never handed out without a copy."""
    text = resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    presets = {}
    for name, record in json.loads(text).items():
        published = record["published"]
        hf_id, *aliases = record["ids"]
        presets[name] = Preset(
            name=name,
            hf_id=hf_id,
            aliases=tuple(aliases),
            config=record["config"],
            params=published["params"],
            digits=published.get("digits"),
            params_source=published["source"],
            source=record["source"],
        )
    return presets


@cache
def _index() -> dict[str, str]:
    """Each lower-case way to write a preset -> its name. A name wins over an id, and an id over another's last part."""
    ids = {id_.lower(): name for name, preset in _presets().items() for id_ in (preset.hf_id, *preset.aliases)}
    return {id_.rpartition("/")[2]: name for id_, name in ids.items()} | ids | {name: name for name in _presets()}


def _own(preset: Preset) -> Preset:
    return replace(preset, config=copy.deepcopy(preset.config))


def names() -> tuple[str, ...]:
    """All preset names, sorted."""
    return tuple(_presets())


def get(name: str) -> Preset | None:
    """The preset called `name`: its name, a Hugging Face id or the id's last part, in any case. None if there is none."""
    key = _index().get(name.strip().lower())
    return None if key is None else _own(_presets()[key])


def nearest(name: str, n: int = 3) -> list[str]:
    """Up to `n` preset names that are spelled most like `name`, best first; empty if nothing is near."""
    index = _index()
    close = difflib.get_close_matches(name.strip().lower(), list(index), n=8 * n, cutoff=0.5)
    return list(dict.fromkeys(index[key] for key in close))[:n]


def search(word: str) -> list[Preset]:
    """The presets whose name, id, alias or model type contains `word`, in any case; all of them for an empty word."""
    needle = word.strip().lower()
    return [
        _own(preset)
        for preset in _presets().values()
        if any(needle in text.lower() for text in (preset.name, preset.hf_id, *preset.aliases, preset.config["model_type"]))
    ]
