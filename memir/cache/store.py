"""Cache files: one for each entry, written atomically, with a digest of all that is in it.

A file is a line `memir-cache VERSION SHA256`, a line of JSON (what the entry depends on and where it holds) and the compressed
record. A file of another form, a cut one or one with a changed bit is never used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memir.cache import CacheWarning

LIMIT = 500 << 20  # bytes of all files; beyond it the ones that were not used for longest go
PER_KEY = 64  # entries of one question, with other sizes or for other states of the sources
VERSION = 1
_FOLDER, _SUFFIX, _UNFINISHED = "programs", ".entry", ".tmp"
_HOUR = 3600.0
_ATTEMPTS = 5
_LONGEST = 1 << 30  # bytes of a record


class DamagedError(Exception):
    """A file is none that memir wrote, or not as memir wrote it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much is kept: files, questions they belong to, bytes."""

    entries: int
    targets: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A file of the cache, read: its line of JSON, and the record to be unpacked."""

    path: Path
    header: str
    packed: bytes

    def record(self) -> str:
        """The record's text. DamagedError if it cannot be unpacked."""
        unpacking = zlib.decompressobj()
        try:
            data = unpacking.decompress(self.packed, _LONGEST)
            if not unpacking.eof:
                raise DamagedError(self.path.name)
            return data.decode("utf-8")
        except (zlib.error, UnicodeDecodeError) as error:
            raise DamagedError(self.path.name) from error


def cache_folder() -> Path:
    """MEMIR_CACHE_DIR, or the user's cache folder as the system has it."""
    given = os.environ.get("MEMIR_CACHE_DIR")
    if given:
        return Path(given).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("memir", appauthor=False)


class Store:
    """The entries under a folder. What the file system refuses is a CacheWarning, once a process, and never an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damaged: list[Path] = []

    def entries(self, key: str) -> Iterator[StoredEntry]:
        """The entries of a question, the latest used first; damaged files are told and left out."""
        for path in _by_use(self._files(self._home(key))):
            try:
                yield read(path)
            except DamagedError:
                self.report_damage(path)
            except FileNotFoundError:  # another process has just removed it
                continue
            except OSError as error:
                warn(f"the cache cannot be read ({error.strerror}): the step is traced anew")

    def save(self, key: str, name: str, header: str, record: str) -> None:
        """Write an entry, in place of one of that name and of damaged ones; old ones give way."""
        home = self._home(key)
        try:
            place = home / f"{name}{_SUFFIX}"
            for attempt in range(_ATTEMPTS):
                home.mkdir(parents=True, exist_ok=True)
                try:
                    write(place, header, record)
                    break
                except FileNotFoundError:  # another process has just cleared the cache
                    if attempt == _ATTEMPTS - 1:
                        raise
            self._damaged = [path for path in self._damaged if path != place]
            for path in self._damaged:
                path.unlink(missing_ok=True)
            self._shrink(home)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
            hint = "`memir cache clear` makes room" if full else "MEMIR_CACHE_DIR names another folder, --no-cache does without"
            warn(f"the cache cannot be written ({error.strerror}): {hint}")

    def used(self, path: Path) -> None:
        """Note that an entry was used now."""
        with contextlib.suppress(OSError):
            os.utime(path)

    def usage(self) -> Usage:
        """What lies there."""
        files = self._all()
        return Usage(len(files), len({path.parent for path in files}), sum(_size(path) for path in files))

    def clear(self) -> Usage:
        """Remove every entry; what was removed. OSError if a file cannot be."""
        usage = self.usage()
        for path in self._all():
            path.unlink(missing_ok=True)
        self._remove_unfinished()
        root = self.folder / _FOLDER
        for folder in [*(p for p in _listed(root) if p.is_dir()), root, self.folder]:
            with contextlib.suppress(OSError):  # it holds something that memir did not put there
                folder.rmdir()
        return usage

    def report_damage(self, path: Path) -> None:
        """Say that a file is not used, and why; the next `save` removes it."""
        self._damaged.append(path)
        shown = path.relative_to(self.folder).as_posix()
        warn(f"a file of the cache is damaged or not memir's and is not used: {shown}")

    def _home(self, key: str) -> Path:
        return self.folder / _FOLDER / key

    def _files(self, folder: Path, suffix: str = _SUFFIX) -> list[Path]:
        return [path for path in _listed(folder) if path.suffix == suffix]

    def _all(self, suffix: str = _SUFFIX) -> list[Path]:
        folders = [path for path in _listed(self.folder / _FOLDER) if path.is_dir()]
        return [path for folder in folders for path in self._files(folder, suffix)]

    def _shrink(self, home: Path) -> None:
        """Remove what is beyond PER_KEY and LIMIT, and what killed processes left."""
        for path in _by_use(self._files(home))[PER_KEY:]:
            path.unlink(missing_ok=True)
        total = 0
        for path in _by_use(self._all()):
            total += _size(path)
            if total > LIMIT:
                path.unlink(missing_ok=True)
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        for path in self._all(_UNFINISHED):
            if _used(path) < time.time() - _HOUR:
                path.unlink(missing_ok=True)


def read(path: Path) -> StoredEntry:
    """A file of the cache. DamagedError if it is none, OSError if it cannot be read."""
    first, _, rest = path.read_bytes().partition(b"\n")
    if first != _first_line(rest):
        raise DamagedError(path.name)
    header, _, packed = rest.partition(b"\n")
    try:
        return StoredEntry(path, header.decode("utf-8"), packed)
    except UnicodeDecodeError as error:
        raise DamagedError(path.name) from error


def write(path: Path, header: str, record: str) -> None:
    """Write an entry beside its place and move it there: whoever reads sees all of it or none."""
    rest = header.encode() + b"\n" + zlib.compress(record.encode("utf-8"), 6)
    import tempfile  # only here: a hit does not need it

    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_first_line(rest) + b"\n" + rest)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def warn(text: str) -> None:
    """A CacheWarning, the same one once a process."""
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, CacheWarning, stacklevel=2)


_SAID: set[str] = set()


def _first_line(rest: bytes) -> bytes:
    return f"memir-cache {VERSION} {hashlib.sha256(rest).hexdigest()}".encode()


def _listed(folder: Path) -> list[Path]:
    """What lies in a folder, sorted; nothing where there is none, or no right to read it."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _by_use(paths: list[Path]) -> list[Path]:
    """The latest used first."""
    return sorted(paths, key=_used, reverse=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
