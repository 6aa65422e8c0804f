"""Indexed names: `h[i]`, `kv[m, L-1-i]`, families `w[L]` and `w[:32]`, ranges `w[1:L-1]`. docs/ir.md has the rules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from memir.errors import ParseError
from memir.ir.size import ZERO, Size
from memir.ir.sizetext import parse_size

_INDEXED = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_STAR = re.compile(r"(?<![^.])(\d*)\*(?:\+(\d+))?(?![^.])")


@dataclass(frozen=True, slots=True)
class Index:
    """One index of a name. `size` is None for text that is no index; `ranged` for `start:size`, or `:size` from 0 on."""

    text: str
    size: Size | None
    ranged: bool = False
    start: Size = ZERO

    @property
    def is_extent(self) -> bool:
        """Whether a declaration with this index declares a family: `:n`, or anything with a symbol in it."""
        return self.size is not None and (self.ranged or not self.size.is_constant)


@lru_cache(maxsize=65536)
def split(name: str) -> tuple[str, tuple[Index, ...]]:
    """`kv[m, L-1-i]` -> ("kv", indices); a name without indices has none, and a name in another form is its own base."""
    found = _INDEXED.fullmatch(name)
    if not found:
        return name, ()
    return found.group(1), tuple(_index(part) for part in _parts(found.group(2)))


def join(base: str, indices: tuple[str, ...]) -> str:
    """The name with these indices: `kv[0,3]`."""
    return f"{base}[{','.join(indices)}]" if indices else base


@lru_cache(maxsize=65536)
def index_text(size: Size) -> str:
    """A size as an index: no blanks, what is added first, `2-i`."""
    added = Size((m, c) for m, c in size.terms if c > 0)
    taken = Size((m, -c) for m, c in size.terms if c < 0)
    if not added.terms or not taken.terms:
        return size.text().replace(" ", "")
    return (added.text() + "".join(f"-{Size((term,)).text()}" for term in taken.terms)).replace(" ", "")


def rename(name: str, env: Mapping[str, Size | int], known: dict[Index, str] | None = None) -> str:
    """The name with the symbols of `env` replaced in its indices, numbers reduced (`h[2-1]` is `h[1]`), and no blanks.

    `known` keeps what an index has become, for further names with the same `env`.
    """
    base, indices = split(name)
    if not indices or any(i.size is None for i in indices):
        return name
    known = {} if known is None else known
    for index in indices:
        if index not in known:
            known[index] = _bind(index, env)
    return join(base, tuple([known[index] for index in indices]))


def spread(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names with ranges of numbers written out: `w[1:3]` is `w[1]`, `w[2]`. ValueError for one with its ends reversed."""
    for name in names:
        if ":" in name:
            return tuple(member for one in names for member in _spread(one))
    return names


def star(period: int, first: int) -> str:
    """What stands in a family's name for the number of the layer: `*`; of every second layer, from the first one on, `2*+1`."""
    return f"{period if period > 1 else ''}*{f'+{first}' if first else ''}"


def full_name(name: str) -> str:
    """A storage's name as the module has it, the layer's number at the star: `h.*.w[3]` is `h.3.w`, `h.2*+1.w[3]` `h.7.w`."""
    base, indices = split(name)
    found = _STAR.search(base)
    if found is None or not indices or not indices[0].text.isdigit():
        return name
    period, first = found.groups()
    number = int(period or 1) * int(indices[0].text) + int(first or 0)
    return f"{base[: found.start()]}{number}{base[found.end() :]}"


def is_range(name: str) -> bool:
    """Whether a reference stands for several members: `w[:L]`, `w[1:L-1]`."""
    return ":" in name and any(i.ranged for i in split(name)[1])


def _spread(name: str) -> list[str]:
    base, indices = split(name)
    choices = []
    for index in indices:
        if index.size is None or not index.ranged or not (index.size.is_constant and index.start.is_constant):
            choices.append([index.text])
            continue
        if index.size.constant < index.start.constant:
            raise ValueError(f"the range {index.text} ends before it begins")
        choices.append([str(k) for k in range(index.start.constant, index.size.constant)])
    return [join(base, chosen) for chosen in itertools.product(*choices)]


def rename_path(path: str, env: Mapping[str, Size | int], known: dict[str, str] | None = None) -> str:
    """A module path with its `{i}` replaced: `layers.{i}.up` -> `layers.3.up`; braces that are no index stay.

    `known` keeps what braces have become, for further paths with the same `env`.
    """
    known = {} if known is None else known

    def replace(found: re.Match[str]) -> str:
        text = found.group(0)
        if text not in known:
            known[text] = bound(found)
        return known[text]

    def bound(found: re.Match[str]) -> str:
        index = _index(found.group(1))
        if index.size is None or index.ranged or not index.size.symbols() & env.keys():
            return found.group(0)
        size = index.size.substitute(env)
        return index_text(size) if size.is_constant else "{" + index_text(size) + "}"

    return _BRACES.sub(replace, path) if "{" in path else path


def path_sizes(path: str) -> list[Size]:
    """What stands in a module path's braces: of `layers.{i}.up` i."""
    return [index.size for text in _BRACES.findall(path) if (index := _index(text)).size is not None]


def _bind(index: Index, env: Mapping[str, Size | int]) -> str:
    if index.size is None or not (index.size.is_constant or (index.size.symbols() | index.start.symbols()) & env.keys()):
        return index.text
    end = index_text(index.size.substitute(env))
    return f"{index_text(index.start.substitute(env)) if index.start.terms else ''}:{end}" if index.ranged else end


@lru_cache(maxsize=65536)
def _index(text: str) -> Index:
    start, colon, end = text.rpartition(":")
    try:
        return Index(text, parse_size(end), bool(colon), parse_size(start) if start else ZERO)
    except ParseError:
        return Index(text, None)


def _parts(text: str) -> list[str]:
    """Split at the commas that are not within parentheses."""
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]
