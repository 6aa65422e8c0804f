"""The text of passes and backends, `name{key=value flag},other`, to frozen dataclasses and back. docs/ir.md has the grammar.

The fields of the dataclass are the options: their names with dashes for underscores and without one at the end, their types as
annotated.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from memir.errors import ParseError
from memir.ir.cursor import Cursor, quoted
from memir.ir.size import Size
from memir.ir.sizetext import parse_size
from memir.registry import nearest

_NAME = re.compile(r"[ \t]*([A-Za-z][\w-]*)")
_KEY = re.compile(r"[ \t]*([A-Za-z_][\w-]*)")
_VALUE = re.compile(r'((?:"(?:[^"\\]|\\.)*")|[^\s{}"]+)')
_BARE = re.compile(r'[^\s{}"]+')
_FREE = tuple[tuple[str, int], ...]  # a field of this type takes every option that is no other field's

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """One `key=value` as written; a value of None is a flag. Columns count from 0."""

    key: str
    value: str | None
    key_at: int
    value_at: int


def parse_list(text: str, load: Callable[[str], type[T]]) -> tuple[T, ...]:
    """The objects that `name{...},name{...}` spells; `load` gives the class of a name. ParseError with a caret otherwise."""
    cursor = Cursor(text.replace("\n", " ").replace("\t", " "), file="pipeline")
    if not cursor.text.strip():
        return ()
    made = [_read(cursor, load)]
    while cursor.sign(","):
        made.append(_read(cursor, load))
    if cursor.text[cursor.position :].strip():
        cursor.fail("expected `,` or the end")
    return tuple(made)


def spec(made: object) -> str:
    """The text that an object comes from: its name, and the options that are not at their defaults."""
    assert dataclasses.is_dataclass(made)
    parts = []
    hints = _hints(type(made))
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if value == _default(field):
            continue
        if hints[field.name] == _FREE:
            parts += [f"{key}={number}" for key, number in value]
        elif value is True:
            parts.append(_dashed(field.name))
        else:
            parts.append(f"{_dashed(field.name)}={_value_text(value)}")
    name = str(getattr(type(made), "name"))  # noqa: B009  # a ClassVar of every pass and backend
    return f"{name}{{{' '.join(parts)}}}" if parts else name


def _read(cursor: Cursor, load: Callable[[str], type[T]]) -> T:
    name_at = cursor.skip_blank()
    name = cursor.take(_NAME, "a name, such as bind{B=4}")
    options: list[Option] = []
    if cursor.sign("{"):
        while not cursor.sign("}"):
            key_at = cursor.skip_blank()
            key = cursor.take(_KEY, "an option or `}`")
            value, value_at = None, cursor.position
            if cursor.sign("="):
                value_at = cursor.skip_blank()
                value = cursor.take(_VALUE, f"a value for {key}")
            options.append(Option(key, value, key_at, value_at))
    return _build(cursor, load(name), name, name_at, options)


def _build(cursor: Cursor, cls: type[T], name: str, name_at: int, options: list[Option]) -> T:
    """The object with these options; what is wrong with one is shown under it."""
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]  # the registry loads only dataclasses
    free = next((n for n in fields if hints[n] == _FREE), None)
    given: dict[str, Any] = {}
    loose: dict[str, int] = {}
    for option in options:
        key = option.key.replace("-", "_")
        key = f"{key}_" if key not in fields and f"{key}_" in fields else key
        known = key in fields and key != free
        if key in given or option.key in loose:
            cursor.fail(f"{name}: {option.key} is given twice", at=option.key_at)
        if not known and free is None:
            names = [_dashed(n) for n in fields]
            hint = nearest(option.key, names) if names else f"{name} has no options"
            cursor.fail(f"{name} has no option {option.key!r}", at=option.key_at, hint=hint)
        hint_type = hints[key] if known else int
        try:
            value = _convert(hint_type, option.value)
        except ValueError as error:
            cursor.fail(f"{name}: {option.key} {error}", at=option.value_at if option.value is not None else option.key_at)
        if known:
            given[key] = value
        else:
            loose[option.key] = value
    if free is not None and loose:
        given[free] = tuple(loose.items())
    for key, field in fields.items():
        if key not in given and _default(field) is dataclasses.MISSING:
            cursor.fail(f"{name} needs the option {_dashed(key)}", at=name_at, hint=f"write  {name}{{{_dashed(key)}=...}}")
    return cls(**given)


def _convert(hint: Any, text: str | None) -> Any:
    """The value that `text` spells in the type `hint`; ValueError says what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        if text in (None, "true", "yes", "on"):
            return True
        if text in ("false", "no", "off"):
            return False
        raise ValueError(f"is true or false, not {text!r}")
    if text is None:
        raise ValueError("needs a value")
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in arguments if a is not type(None)]
        return None if text == "none" and len(inner) < len(arguments) else _convert(inner[0], text)
    if origin is typing.Literal:
        for choice in arguments:
            if str(choice) == text:
                return choice
        raise ValueError(f"is one of {', '.join(map(str, arguments))}, not {text!r}")
    if origin is tuple:
        return tuple(_convert(arguments[0], part) for part in text.split(",") if part)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert(typing.Literal[tuple(m.value for m in hint)], text) and hint(text)
    return _scalar(hint, text)


def _scalar(hint: Any, text: str) -> Any:
    try:
        if hint is int:
            return int(text)
        if hint is float:
            return float(text)
        if hint is Size:
            return parse_size(text)
    except ValueError:
        raise ValueError(f"is {'a whole number' if hint is int else 'a number'}, not {text!r}") from None
    except ParseError as error:
        raise ValueError(f"is a size: {error.message}") from None
    if hint is str:
        return text
    raise TypeError(f"options of type {hint} cannot be written as text")


def _value_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        text = ",".join(map(str, value))
    elif isinstance(value, Size):
        text = value.text().replace(" ", "")
    else:
        text = str(value.value) if isinstance(value, enum.Enum) else str(value)
    return text if _BARE.fullmatch(text) else quoted(text)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _dashed(name: str) -> str:
    """A field as an option: `weight_decay` is `weight-decay`, and `name_`, as `name` is the class's own, is `name`."""
    return name.rstrip("_").replace("_", "-")


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)
