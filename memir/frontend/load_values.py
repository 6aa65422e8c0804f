"""Text of a `--set` option to a value of the right type, and near names for a mistyped one."""

from __future__ import annotations

import ast
import difflib
import enum
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from memir.errors import UsageError

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")


def nearest_names(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """Known names that look like `name`, nearest first; a part in common counts too (`embd` finds `n_embd`)."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=count, cutoff=0.55)
    by_lower = {n.lower(): n for n in reversed(names)}
    found = [by_lower[c] for c in close]
    found += [n for n in names if n not in found and len(name) > 2 and (name.lower() in n.lower())]
    return found[:count]


def is_none(text: str) -> bool:
    """Whether the text spells None: `none` or `null`."""
    return text.strip().lower() in _NONE


def convert(text: str, like: Any, option: str, annotation: Any = None) -> Any:
    """`text` as a value of the annotation's type, or else of the type of `like` (the value it replaces).

    Numbers may have underscores (`1_000`). When neither says a type, a Python literal is taken as one and the rest is text.
    UsageError names `option` when the text is no such value.
    """
    allowed = _types(annotation)
    if not allowed and like is not None:
        allowed = [type(like)]
    if not allowed or Any in allowed:
        return _literal(text)
    problems = []
    for kind in allowed:
        try:
            return _as(text, kind)
        except (ValueError, SyntaxError) as error:
            problems.append(str(error))
    wanted = " or ".join(_type_name(kind) for kind in allowed)
    raise UsageError(f"{option}: {text!r} is not {wanted}", hint=problems[0] if len(problems) == 1 else "")


def _type_name(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _types(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, the narrowest first: `Optional[int]` is int, then none; a text annotation is read."""
    if annotation is None or isinstance(annotation, str):
        simple: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
        words = [] if annotation is None else [p.strip() for p in annotation.removeprefix("Optional[").rstrip("]").split("|")]
        return [simple[word] for word in words if word in simple]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [kind for part in typing.get_args(annotation) for kind in _types(part)] or [Any]
        order = (type(None), bool, int, float)
        return sorted(parts, key=lambda kind: order.index(kind) if kind in order else len(order))
    if origin is typing.Literal:
        return [annotation]
    if origin is typing.Annotated:
        return _types(typing.get_args(annotation)[0])
    return [origin] if origin is not None else [annotation]


def _as(text: str, kind: Any) -> Any:
    word = text.strip().lower()
    if kind is type(None):
        if is_none(text):
            return None
        raise ValueError("not none")
    if kind is bool:
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise ValueError("write true or false")
    if kind in (int, float):
        return _number(text, kind)
    if kind is str:
        return text
    if kind is torch.dtype:
        found = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
        raise ValueError("write a dtype, such as float32")
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        found_choice = [choice for choice in choices if str(choice) == text]
        if found_choice:
            return found_choice[0]
        raise ValueError(f"choose from {', '.join(map(str, choices))}")
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum(text, kind)
    return _container(_literal(text), kind)


def _container(value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, (list, tuple, set, frozenset)):
        if not isinstance(value, (list, tuple, set)):
            raise ValueError("write a list, such as [1, 2]")
        return kind(value)
    if isinstance(kind, type) and issubclass(kind, (Mapping, Sequence)) and not isinstance(value, kind):
        raise ValueError(f"write a Python literal of type {kind.__name__}")
    return value


def _number(text: str, kind: type[int] | type[float]) -> int | float:
    """An int or a float; `1e6` is an integer where one is asked for, `2.5` is not."""
    try:
        return kind(text)
    except ValueError:
        if kind is int:
            value = float(text)
            if value.is_integer():
                return int(value)
        raise ValueError(f"write {'a whole number' if kind is int else 'a number'}") from None


def _enum(text: str, kind: type[enum.Enum]) -> enum.Enum:
    for member in kind:
        if text in (member.name, str(member.value)):
            return member
    raise ValueError(f"choose from {', '.join(member.name for member in kind)}")


def _literal(text: str) -> Any:
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    if is_none(text):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def plain_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a configuration (numbers, text, lists, dictionaries), in name order, for the report."""
    return {str(name): plain for name, value in sorted(values.items()) if (plain := _plain(value)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return None


def near_files(path: Path) -> str:
    """A hint for a path that does not exist: files of like name in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    close = nearest_names(path.name, (p.name for p in folder.iterdir() if p.suffix in (".py", ".json") or p.is_dir()))
    return f"nearest: {', '.join(str(folder / name) for name in close)}" if close else ""
