"""The configuration: `[tool.memir]` of pyproject.toml, or memir.toml, with a scenario in each `[scenarios.NAME]`.

Every mistake in it is a UsageError with file and line.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memir.check.scenario import Budgets, Increase, Scenario
from memir.check.toml import Document, read
from memir.errors import MemirError, ParseError, UsageError
from memir.hardware import Gpu, parse_gpu
from memir.ir.size import Size
from memir.ir.sizetext import parse_size
from memir.pipeline import Pipeline
from memir.recipe import Recipe

FILES = ("memir.toml", "pyproject.toml")
BASELINE = "memir-baseline.json"
_TOP = ("baseline", "defaults", "scenarios")
_STEP = ("target", "batch", "seq", "set", "inputs", "trust_remote_code", "parallel", "gpu", "skip")
_BUDGETS = tuple(f.name for f in fields(Budgets))
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"(\d+)(?:\.(\d+))?\s*([A-Za-z]+)?")
_NAME = re.compile(r"[^\s/:]+")


@dataclass(frozen=True, slots=True)
class Config:
    """What a configuration says. `folder` is the one that targets are relative to."""

    path: Path
    shown: str
    folder: Path
    baseline: Path
    scenarios: tuple[Scenario, ...]  # by name

    def chosen(self, names: Iterable[str]) -> tuple[Scenario, ...]:
        """The scenarios of these names, or all; in the order of their names whatever order was asked."""
        known = {scenario.name: scenario for scenario in self.scenarios}
        wanted = dict.fromkeys(names) or known
        for name in wanted:
            if name not in known:
                raise UsageError(f"there is no scenario {name!r}", where=self.shown, hint=_nearest(name, known))
        return tuple(known[name] for name in sorted(wanted))


def find(start: Path) -> Path | None:
    """The configuration of a folder or the nearest one above it; None if there is none."""
    for folder in (start, *start.parents):
        for name in FILES:
            path = folder / name
            if path.is_file() and (name == "memir.toml" or _table(read(path, name)) is not None):
                return path
        if (folder / ".git").exists():
            return None
    return None


def load(path: Path, shown: str) -> Config:
    """The configuration in a file. UsageError, with file and line, for what cannot be meant."""
    document = read(path, shown)
    prefix = ("tool", "memir") if path.name == "pyproject.toml" else ()
    table = _table(document) if prefix else document.data
    if table is None:
        raise UsageError(f"{shown} has no [tool.memir]", hint="memir init  writes one")
    reader = _Reader(document)
    reader.known(prefix, table, _TOP)
    folder = path.resolve().parent
    baseline = reader.text((*prefix, "baseline"), table.get("baseline", BASELINE))
    defaults = reader.table((*prefix, "defaults"), table.get("defaults", {}))
    reader.known((*prefix, "defaults"), defaults, tuple(k for k in reader.keys if k not in ("target", "skip")))
    scenarios = reader.table((*prefix, "scenarios"), table.get("scenarios", {}))
    found = [
        reader.scenario(name, (*prefix, "scenarios", name), values, (*prefix, "defaults"), defaults)
        for name, values in sorted(scenarios.items())
    ]
    return Config(path, shown, folder, folder / baseline, tuple(found))


def scenario_of(name: str, values: Mapping[str, Any]) -> Scenario:
    """A scenario from values that were not read from a file. UsageError for what cannot be meant."""
    reader = _Reader(Document(Path(), "", {}))
    label = re.sub(r"[\s/:]+", "-", name) or "step"
    return reader.scenario(label, (label,), dict(values), (), {})


def _table(document: Document) -> dict[str, Any] | None:
    found = document.data.get("tool", {}).get("memir") if isinstance(document.data.get("tool"), dict) else None
    return found if isinstance(found, dict) else None


class _Reader:
    """Values of a document, checked; `at` is a key's path, which messages are about."""

    def __init__(self, document: Document) -> None:
        self._document = document
        hints = typing.get_type_hints(Recipe)
        # a scenario's target is the model and its gpu a card: the recipe's target is `device`, and its gpu is the card's
        self._recipe = {"device" if name == "target" else name: hint for name, hint in hints.items() if name != "gpu"}
        self.keys = (*_STEP, *_BUDGETS, *self._recipe)

    def fail(self, at: tuple[str, ...], message: str, hint: str = "") -> UsageError:
        """An error about a key, to raise."""
        return UsageError(message, where=self._document.where(at), hint=hint)

    def known(self, at: tuple[str, ...], table: Mapping[str, Any], names: Iterable[str]) -> None:
        """UsageError for a key that is none of `names`."""
        allowed = list(names)
        for key in table:
            if key.replace("-", "_") not in allowed:
                raise self.fail((*at, key), f"unknown key {key!r}", _nearest(key, allowed))

    def table(self, at: tuple[str, ...], value: Any) -> dict[str, Any]:
        """A table."""
        if not isinstance(value, dict):
            raise self.fail(at, f"{at[-1]} is a table, not {_kind(value)}")
        return value

    def text(self, at: tuple[str, ...], value: Any) -> str:
        """A text that is not empty."""
        if not isinstance(value, str) or not value.strip():
            raise self.fail(at, f"{at[-1]} is a text, not {_kind(value)}")
        return value

    def scenario(
        self, name: str, at: tuple[str, ...], value: Any, defaults_at: tuple[str, ...], defaults: Mapping[str, Any]
    ) -> Scenario:
        """A scenario from its table and the defaults."""
        own = self.table(at, value)
        self.known(at, own, self.keys)
        if not _NAME.fullmatch(name):
            raise self.fail(at, f"a scenario's name has no blanks, slashes or colons: {name!r}")
        values = {k.replace("-", "_"): (defaults_at, k, v) for k, v in defaults.items()}
        values |= {k.replace("-", "_"): (at, k, v) for k, v in own.items()}
        if "target" not in values:
            raise self.fail(at, f"the scenario {name} has no target", 'write  target = "model.py:GPT"')
        got = {key: ((*base, spelled), value) for key, (base, spelled, value) in values.items()}
        budgets = self._budgets(got, at)
        gpu = self._gpu(*got["gpu"]) if "gpu" in got else None
        self._agree(got, budgets, gpu)
        return Scenario(
            name=name,
            target=self.text(*got["target"]),
            recipe=self._recipe_of(got, gpu or budgets.fits, at),
            batch=self._count(*got["batch"]) if "batch" in got else None,
            seq=self._count(*got["seq"]) if "seq" in got else None,
            sets=self._sets(*got["set"]) if "set" in got else {},
            inputs=self.text(*got["inputs"]) if "inputs" in got else None,
            trust_remote_code=self._flag(*got["trust_remote_code"]) if "trust_remote_code" in got else False,
            parallel=self._passes(*got["parallel"]) if "parallel" in got else "",
            budgets=budgets,
            skip=self.text(*got["skip"]) if "skip" in got else "",
            file=self._document.shown,
            line=self._document.line(at),
        )

    def _count(self, at: tuple[str, ...], value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(at, f"{at[-1]} is a positive number, not {_kind(value)}")
        return value

    def _passes(self, at: tuple[str, ...], value: Any) -> str:
        text = self.text(at, value)
        try:
            Pipeline.parse(text)
        except UsageError as error:
            raise self.fail(at, f"parallel: {error.message}", error.hint) from None
        return text

    def _flag(self, at: tuple[str, ...], value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.fail(at, f"{at[-1]} is true or false, not {_kind(value)}")
        return value

    def _sets(self, at: tuple[str, ...], value: Any) -> dict[str, str]:
        found = {}
        for key, item in self.table(at, value).items():
            if isinstance(item, list | dict):
                raise self.fail((*at, key), f"{key} is a plain value, not {_kind(item)}")
            found[key] = str(item) if not isinstance(item, bool) else ("true" if item else "false")
        return found

    def _gpu(self, at: tuple[str, ...], value: Any) -> Gpu:
        try:
            return parse_gpu(self.text(at, value))
        except UsageError as error:
            raise self.fail(at, error.message.replace("--gpu", at[-1]), error.hint.replace("--gpu ", "")) from None

    def _bytes(self, at: tuple[str, ...], value: Any) -> int:
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise self.fail(at, f"{at[-1]}: {error}", f'write  {at[-1]} = "76GiB"') from None

    def _budgets(self, got: Mapping[str, tuple[tuple[str, ...], Any]], at: tuple[str, ...]) -> Budgets:
        return Budgets(
            max=self._bytes(*got["max"]) if "max" in got else None,
            max_increase=self._increase(*got["max_increase"]) if "max_increase" in got else None,
            max_order=self._order(*got["max_order"]) if "max_order" in got else None,
            fits=self._gpu(*got["fits"]) if "fits" in got else None,
            max_saved_per_layer=self._bytes(*got["max_saved_per_layer"]) if "max_saved_per_layer" in got else None,
        )

    def _increase(self, at: tuple[str, ...], value: Any) -> Increase:
        found = re.fullmatch(r"(\d+)(?:\.(\d{1,4}))?\s*%", value.strip()) if isinstance(value, str) else None
        if found:
            digits = found[2] or ""
            return Increase(value, millionths=int(found[1] + digits) * 10 ** (4 - len(digits)))
        try:
            return Increase(str(value), nbytes=parse_bytes(value))
        except ValueError as error:
            raise self.fail(at, f"{at[-1]}: {error}", f'write  {at[-1]} = "1%"  or  "64MiB"') from None

    def _order(self, at: tuple[str, ...], value: Any) -> Size:
        try:
            size = parse_size(self.text(at, value))
        except ParseError as error:
            raise self.fail(at, f"{at[-1]}: {error.message}", f'write  {at[-1]} = "B*S"') from None
        if size.symbols() - {"B", "S"}:
            raise self.fail(at, f"{at[-1]}: {', '.join(sorted(size.symbols() - {'B', 'S'}))}: only B and S are known there")
        return size

    def _recipe_of(self, got: Mapping[str, tuple[tuple[str, ...], Any]], gpu: Gpu | None, at: tuple[str, ...]) -> Recipe:
        values = {}
        for name, hint in self._recipe.items():
            if name in got:
                values["target" if name == "device" else name] = self._converted(*got[name], hint)
        try:
            recipe = Recipe(**values)
            if gpu is not None and gpu.card is not None:
                from memir.api import on_gpu

                recipe = on_gpu(recipe, gpu)
        except UsageError as error:
            key = {"target": "device"}.get(word := error.message.partition(":")[0].replace("-", "_"), word)
            where = got[key][0] if key in got else at
            message = error.message.replace("target:", "device:", 1) if key == "device" else error.message
            raise self.fail(where, message.removeprefix("--"), error.hint.replace("--target", "device =")) from None
        return recipe

    def _converted(self, at: tuple[str, ...], value: Any, hint: Any) -> Any:
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        optional = isinstance(hint, types.UnionType) and len(inner) == 1
        kind = inner[0] if optional else hint
        if optional and value == "none":
            return None
        if hasattr(kind, "parse"):
            try:
                return kind.parse(self.text(at, value))
            except MemirError as error:
                raise self.fail(at, error.message.replace("--", ""), error.hint.replace("--", "")) from None
        if kind is bool:
            return self._flag(at, {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            words = {"int": "a whole number", "float": "a number", "str": "a text"}
            raise self.fail(at, f"{at[-1]} is {words.get(kind.__name__, kind.__name__)}, not {_kind(value)}")
        return value

    def _agree(self, got: Mapping[str, tuple[tuple[str, ...], Any]], budgets: Budgets, gpu: Gpu | None) -> None:
        """UsageError for budgets that contradict each other."""
        fits = budgets.fits
        if fits is not None and budgets.max is not None and budgets.max > fits.nbytes:
            raise self.fail(got["max"][0], f"max is more than all of {fits.name}, which it has to fit", "leave one of them out")
        if fits is not None and gpu is not None and gpu.nbytes < fits.nbytes and fits.card is None:
            raise self.fail(got["fits"][0], f"fits is more than all of {gpu.name}", "leave one of them out")
        if fits is not None and gpu is not None and None not in (gpu.card, fits.card) and gpu.card != fits.card:
            raise self.fail(got["fits"][0], f"gpu is {gpu.name} and fits is {fits.name}: kernels are those of one GPU")
        trains = "mode" not in got or got["mode"][1] == "train"
        if budgets.max_saved_per_layer is not None and not trains:
            raise self.fail(got["max_saved_per_layer"][0], 'nothing is saved for backward with  mode = "forward"')


def parse_bytes(value: Any) -> int:
    """`"76GiB"`, `"512 MiB"`, or a plain number of bytes. ValueError, in words, for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative")
        return value
    found = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{value!r} is no amount of memory")
    whole, fraction, unit = found[1], found[2] or "", found[3]
    if unit is None:
        raise ValueError(f"{value!r} has no unit; known: {', '.join(_UNITS)}")
    factor: int | None = {name.lower(): size for name, size in _UNITS.items()}.get(unit.lower())
    if factor is None:
        raise ValueError(f"{value!r} has an unknown unit; known: {', '.join(_UNITS)}")
    return int(int(whole + fraction) * factor // 10 ** len(fraction))


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return repr(value)


def _nearest(word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(word.replace("-", "_"), names, n=3) or difflib.get_close_matches(word, names, n=3)
    return f"did you mean  {', '.join(near)}?" if near else f"known: {', '.join(names)}"
