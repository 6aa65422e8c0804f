"""Configuration objects of any kind: what fields they have, and how to make one with some of them changed.

Kinds: dataclasses, pydantic models, named tuples, plain classes (attributes of the class or of its constructor), objects with
attributes, dictionaries.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MISSING: Any = inspect.Parameter.empty
CONFIG_CLASS = re.compile(r"config|cfg|args|hparams|params|settings|options|hyper", re.IGNORECASE)


@dataclass(slots=True)
class Source:
    """A configuration that can be made: its name, its fields (default or MISSING, annotation), and how it is made."""

    label: str
    fields: dict[str, tuple[Any, Any]]
    make: Callable[[dict[str, Any]], Any]


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """The parameters of a class's constructor or a function; none where they cannot be known."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def is_config_class(kind: Any) -> bool:
    """Whether a class is a configuration: a dataclass, named tuple or pydantic model, or one that is called so."""
    if not inspect.isclass(kind) or issubclass(kind, (torch.nn.Module, torch.Tensor, int, float, str, bool)):
        return False
    if kind.__module__.partition(".")[0] in ("builtins", "typing", "torch", "collections"):
        return False
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return (
        dataclasses.is_dataclass(kind)
        or named_tuple
        or hasattr(kind, "model_fields")
        or bool(CONFIG_CLASS.search(kind.__name__))
    )


def is_config(value: Any) -> bool:
    """Whether a value is an object of such a class."""
    return not inspect.isclass(value) and is_config_class(type(value))


def config_values(config: Any) -> dict[str, Any]:
    """The fields of any configuration object as a dictionary (nested ones as dictionaries)."""
    if isinstance(config, Mapping):
        values = dict(config)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = {f.name: getattr(config, f.name, None) for f in dataclasses.fields(config)} | vars_of(config)
    elif isinstance(config, tuple) and hasattr(config, "_asdict"):
        values = config._asdict()
    elif callable(getattr(config, "model_dump", None)):
        values = config.model_dump()
    elif callable(getattr(config, "to_dict", None)):
        values = config.to_dict()
    else:
        values = {n: v for n, v in vars(type(config)).items() if not n.startswith("_") and not callable(v)} | vars_of(config)
    return {str(n): config_values(v) if is_config(v) else v for n, v in values.items() if not str(n).startswith("_")}


def vars_of(value: Any) -> dict[str, Any]:
    """`vars`, and empty for objects without a dictionary (slots)."""
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def source_of_class(kind: type) -> Source:
    """A configuration that is made by calling a class; fields that its constructor does not take are set afterwards."""
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        fields = {f.name: (_default(f) if f.init else None, hints.get(f.name, f.type)) for f in dataclasses.fields(kind)}
        late = {f.name for f in dataclasses.fields(kind) if not f.init}
        return Source(kind.__name__, fields, lambda given: _with_attributes(kind, given, late))
    if hasattr(kind, "model_fields"):  # pydantic
        fields = {
            n: (MISSING if f.is_required() else f.get_default(call_default_factory=True), f.annotation)
            for n, f in kind.model_fields.items()
        }
        return Source(kind.__name__, fields, lambda given: kind(**given))
    parameters = {p.name: p for p in parameters_of(kind) if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    hints = _hints(kind) | _hints(vars(kind).get("__init__"))
    own = {n: (v, hints.get(n)) for c in reversed(kind.__mro__[:-1]) for n, v in vars(c).items() if _is_field(n, v)}
    fields = own | {n: (p.default, hints.get(n)) for n, p in parameters.items()}
    if all(p.default is not MISSING for p in parameters.values()):
        try:
            fields = {n: (v, hints.get(n)) for n, v in vars_of(kind()).items() if not n.startswith("_")} | fields
        except Exception:  # a boundary: the user's constructor; making the configuration for good reports it
            return Source(kind.__name__, fields, lambda given: kind(**given))
    late = set(fields) - set(parameters)
    return Source(kind.__name__, fields, lambda given: _with_attributes(kind, given, late))


def source_of_value(value: Any, label: str) -> Source:
    """A configuration that exists: a copy with changes (a dataclass is made anew, so that its derived fields follow)."""
    fields = {
        n: (v, None)
        for n, v in (value.items() if isinstance(value, Mapping) else vars_of(value).items())
        if not n.startswith("_")
    }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        fields = {f.name: (getattr(value, f.name), hints.get(f.name)) for f in dataclasses.fields(value)}
        return Source(label, fields, lambda given: dataclasses.replace(value, **given))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        kind, old = type(value), dict(value._asdict())
        return Source(label, {n: (v, None) for n, v in old.items()}, lambda given: kind(**{**old, **given}))

    def changed(given: dict[str, Any]) -> Any:
        other = copy.deepcopy(value)
        if isinstance(other, dict):
            other.update(given)
        else:
            for name, item in given.items():
                setattr(other, name, item)
        return other

    return Source(label, fields, changed)


def _is_field(name: str, value: Any) -> bool:
    descriptor = isinstance(value, (property, classmethod, staticmethod)) or inspect.isroutine(value) or inspect.isclass(value)
    return not name.startswith("_") and not descriptor


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return dict(getattr(kind, "__annotations__", {}))


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else MISSING


def _with_attributes(kind: type, given: Mapping[str, Any], late: set[str]) -> Any:
    config = kind(**{n: v for n, v in given.items() if n not in late})
    for name in late & set(given):
        setattr(config, name, given[name])
    return config
