"""A TOML file with the line of every key, for messages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memir.errors import ParseError, UsageError

_HEADER = re.compile(r"^\s*\[+\s*(.+?)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


@dataclass(frozen=True, slots=True)
class Document:
    """A file's data, and where each of its keys stands."""

    path: Path
    shown: str  # as messages name it
    data: dict[str, Any]
    _lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    _text: tuple[str, ...] = ()

    def where(self, keys: Iterable[str]) -> str:
        """`file:line` of a key, or of the nearest table around it, and the line itself."""
        path = tuple(keys)
        while path and path not in self._lines:
            path = path[:-1]
        line = self._lines.get(path)
        return self.shown if line is None else f"{self.shown}:{line}\n{self._text[line - 1].strip()}"

    def line(self, keys: Iterable[str]) -> int:
        """The line of a key; 0 where it has none of its own."""
        return self._lines.get(tuple(keys), 0)


def read(path: Path, shown: str) -> Document:
    """The file. UsageError: it cannot be read; ParseError: it is no TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {shown}: {error}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        lines = text.splitlines()
        line = min(int(found[1]) if found else len(lines), max(len(lines), 1))
        column = int(found[2]) if found else 1
        message = re.sub(r"\s*\(at .*\)", "", str(error))
        content = lines[line - 1] if lines else ""
        raise ParseError(message, file=shown, line=line, column=min(column, len(content) + 1), text=content) from None
    return Document(path, shown, data, _locate(text), tuple(text.splitlines()))


def _locate(text: str) -> dict[tuple[str, ...], int]:
    """The line of each table and key; keys within a value that spans lines or an inline table have none."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            keys = table
        elif key := _KEY.match(line):
            keys = (*table, *_parts(key[1]))
        else:
            continue
        for length in range(len(keys), 0, -1):
            found.setdefault(keys[:length], number)
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))
