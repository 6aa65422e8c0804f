"""Sees what a model's code reads while it is loaded and traced.

Python's audit events (PEP 578) tell of every file that is opened and every folder that is listed, a finder in front of
`sys.meta_path` of every module that is looked for. `os.environ` and `os.stat` tell meanwhile which variables the user's code
reads and for which files it asks. Not seen: what compiled code opens by itself, other processes, the network, the clock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, cast

from memir.cache.callers import asked_by_user, imported_by_user, is_importlib, only_shown
from memir.cache.environment import is_installed, is_library, process_started
from memir.cache.manifest import Manifest, candidates, contents, hashed, listing

MODEL_PACKAGES = ("transformers", "peft", "accelerate")  # their sources are compared, not only their versions
_BY_VERSION = ("torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "networkx")  # so many files: the version says it
_EVENTS = frozenset(("open", "import", "ctypes.dlopen", "os.listdir", "os.scandir"))
_STAT_SETS = (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks)  # they tell what the function os.stat can do
_LOCK = threading.RLock()
_Environ = type(os.environ)


class Watch:
    """While it is entered, everything that is read is noted. A second thread waits: what is replaced belongs to the process."""

    def __init__(self, packages: Iterable[str] = ()) -> None:
        self._packages = {*MODEL_PACKAGES, *packages}  # installed packages whose sources are the model's
        self._files: dict[str, str | None] = {}  # contents at the first reading
        self._exists: dict[str, bool] = {}
        self._listings: dict[str, str | None] = {}
        self._modules: dict[str, set[str]] = {}
        self._top_folders: set[str] = set()
        self._variables: dict[str, str | None] = {}
        self._noting = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _install()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_LOCK)
            self._stat = os.stat
            os.stat = self._asked
            stack.callback(setattr, os, "stat", self._stat)
            for names in _STAT_SETS:
                if self._stat in names:
                    names.add(self._asked)
                    stack.callback(names.discard, self._asked)
            stack.callback(setattr, os.environ, "__class__", os.environ.__class__)
            os.environ.__class__ = cast("Any", _WatchedEnviron)
            sys.meta_path.insert(0, self)
            stack.callback(_remove, sys.meta_path, self)
            _active.append(self)
            stack.callback(_remove, _active, self)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()

    def manifest(self, *, relative: bool) -> Manifest | None:
        """What was read, `relative` to the working directory or not; None if some of it may have changed since.

        A file that was read meanwhile is compared with its first reading. A module that was imported before counts as
        unchanged if it is older than this process.
        """
        files: dict[str, str] = {}
        exists = dict(self._exists)
        for path, before in self._files.items():
            now = contents(path)
            if now != before:
                return None
            if now is None:
                exists[path] = os.path.exists(path)
            else:
                files[path] = now
        for path in self._module_files():
            if path not in files:
                now = contents(path)
                if now is None or os.stat(path).st_mtime_ns >= process_started():
                    return None
                files[path] = now
        tops = {name.partition(".")[0] for name in list(sys.modules)}
        modules = {
            folder: (sorted(names), candidates(folder, names))
            for folder, seen in sorted(self._modules.items())
            for names in [seen | tops if folder in self._top_folders else seen]
        }
        if any(listing(folder) != names for folder, names in self._listings.items()):
            return None
        return Manifest(
            files=dict(sorted(files.items())),
            exists=dict(sorted(exists.items())),
            listings={folder: names for folder, names in sorted(self._listings.items()) if names is not None},
            modules=modules,
            variables=dict(sorted(self._variables.items())),
            cwd=os.getcwd() if relative or self._shows_other_places() else None,
        )

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event."""
        if self._noting:
            return
        self._noting = True
        try:
            frame = sys._getframe(2)
            if event == "open":
                if not only_shown(frame):
                    self._opened(*arguments)
            elif event in ("import", "ctypes.dlopen"):  # compiled modules and libraries
                library = arguments[1 if event == "import" else 0]
                if isinstance(library, str) and os.path.isfile(library):
                    self._opened(library, "rb", 0)
            elif not is_importlib(frame) and asked_by_user(frame):
                folder = _absolute(arguments[0] or ".")
                if folder and not is_library(folder):
                    self._listings.setdefault(folder, listing(folder))
        finally:
            self._noting = False

    def read_variable(self, name: str, value: str | None) -> None:
        """A variable of the environment was read."""
        if name not in self._variables and asked_by_user(sys._getframe(3)):
            self._variables[name] = hashed(value)

    def _opened(self, path: Any, mode: str | None, flags: int) -> None:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else "r" not in mode
        place = None if writes else _absolute(path)
        if place is None:
            return
        if place.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # a module without its source
                place = importlib.util.source_from_cache(place)
        if not is_library(place) and place not in self._files:
            self._files[place] = contents(place)

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        """A module is looked for (as a finder that never finds one)."""
        parent, _, leaf = name.rpartition(".")
        top = name.partition(".")[0]
        if top not in self._packages and imported_by_user(sys._getframe(1)):
            self._packages.add(top)
        for place in sys.path if path is None else path:
            folder = _absolute(place or ".")
            if folder and not is_library(folder):
                self._modules.setdefault(folder, set()).add(leaf)
                if not parent:
                    self._top_folders.add(folder)

    def _asked(self, path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        """os.stat, told whether there is such a file when the user's code asks."""
        asked = None if self._noting or not asked_by_user(sys._getframe(1)) else _absolute(path)
        asked = None if asked is None or is_library(asked) else asked
        try:
            found = self._stat(path, *arguments, **keywords)
        except OSError:
            if asked is not None:
                self._exists.setdefault(asked, False)
            raise
        if asked is not None:
            self._exists.setdefault(asked, True)
        return found

    def _shows_other_places(self) -> bool:
        """Whether some of the code lies where its lines are shown relative to the working directory."""
        packages = (getattr(sys.modules.get(name), "__file__", None) for name in MODEL_PACKAGES)
        return any(path.endswith(".py") for path in self._files) or not all(is_installed(path) for path in packages if path)

    def _module_files(self) -> Iterator[str]:
        """The sources of modules that the model's code may consist of, imported now or before."""
        script = sys.modules.get("__main__")  # it asks memir; a model in it is read from its file again
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            top = name.partition(".")[0]
            if module is script or not isinstance(path, str) or not path.endswith(".py") or not os.path.isabs(path):
                continue
            if is_installed(path):
                if top in self._packages and top not in _BY_VERSION:
                    yield path
            elif not is_library(path):
                yield path


class _WatchedEnviron(_Environ):  # type: ignore[misc, valid-type]  # the class of os.environ, which has no public name
    def __getitem__(self, name: Any) -> Any:
        try:
            value = super().__getitem__(name)
        except KeyError:
            _tell_variable(name, None)
            raise
        _tell_variable(name, value)
        return value


def _tell_variable(name: Any, value: str | None) -> None:
    for watch in _active:
        if isinstance(name, str):
            watch.read_variable(name, value)


_active: list[Watch] = []
_installed = False


def _install() -> None:
    """The audit hook, which cannot be taken off again; without a watch it does nothing."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _active and event in _EVENTS:
        for watch in _active:
            watch.note(event, arguments)


def _absolute(path: Any) -> str | None:
    """A path as text; None for what is none, such as a number of an open file."""
    try:
        return os.path.abspath(os.fsdecode(path))
    except (TypeError, ValueError, OSError):
        return None


def _remove(items: list[Any], item: object) -> None:
    with contextlib.suppress(ValueError):  # the model's code may have replaced the list's contents
        items.remove(item)
