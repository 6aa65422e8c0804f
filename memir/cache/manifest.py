"""What one trace read beside its options: files, places where modules were looked for, variables; whether it is still so."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

_LARGE = 4 << 20  # bytes; a file that is larger (weights) is known by its size and time


@dataclass(frozen=True, slots=True)
class Manifest:
    """Facts outside of memir that a traced program rests on. Paths are absolute; they are compared and never printed."""

    files: dict[str, str] = field(default_factory=dict)  # a file that was read -> `contents` of it
    exists: dict[str, bool] = field(default_factory=dict)  # a path that was asked for -> whether it was there
    listings: dict[str, str] = field(default_factory=dict)  # a folder that was listed -> `listing` of it
    # A folder that modules were looked for in -> names looked for, and the entries there that would have been one of them.
    modules: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)  # an environment variable -> `hashed` value
    cwd: str | None = None  # the working directory, where paths in the program are relative to it

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        return (
            self.cwd in (None, os.getcwd())
            and all(hashed(os.environ.get(name)) == value for name, value in self.variables.items())
            and all(os.path.exists(path) is there for path, there in self.exists.items())
            and all(candidates(folder, names) == found for folder, (names, found) in self.modules.items())
            and all(listing(folder) == names for folder, names in self.listings.items())
            and all(contents(path) == digest for path, digest in self.files.items())
        )

    def to_data(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Manifest:
        """From what `to_data` gave; ValueError, TypeError or KeyError for anything else."""
        if set(data) != {f.name for f in fields(Manifest)}:
            raise ValueError("other fields than a manifest has")
        modules = {folder: (list(names), list(found)) for folder, (names, found) in data["modules"].items()}
        plain = {name: dict(data[name]) for name in ("files", "exists", "listings", "variables")}
        return Manifest(**plain, modules=modules, cwd=data["cwd"])


def contents(path: str) -> str | None:
    """The digest of a file's contents, or of size and time if it is large; None if there is no such file to read."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return None
        if found.st_size > _LARGE:
            return f"{found.st_size} bytes {found.st_mtime_ns}"
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, ValueError):
        return None


def listing(folder: str) -> str | None:
    """The digest of the names in a folder; None if it cannot be listed."""
    try:
        names = sorted(name for name in os.listdir(folder) if name != "__pycache__")
    except OSError:
        return None
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()


def candidates(folder: str, names: Iterable[str]) -> list[str]:
    """The entries of a folder that an import of one of these names would find: modules, extensions, packages."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    wanted = set(names)
    suffixes = (".py", ".pyc", *EXTENSION_SUFFIXES)
    return sorted(
        entry
        for entry in entries
        if entry.partition(".")[0] in wanted
        and (entry.endswith(suffixes) or ("." not in entry and os.path.isdir(os.path.join(folder, entry))))
    )


def hashed(value: str | None) -> str | None:
    """A variable's value as it is kept: it may be a secret."""
    return None if value is None else hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()
