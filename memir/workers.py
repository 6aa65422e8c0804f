"""Calls in processes side by side: each in a folder of its own choice, with the user's code kept out of this process.

A call is the name of a function of memir and its arguments. The answers come in the order of the calls, whatever process was
free first. A process that dies takes only its call with it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from memir.errors import InconclusiveError, MemirError, UsageError

_LENGTH = struct.Struct(">Q")
_CHILD = "import sys; from memir.workers import serve; serve(*sys.argv[1:3])"  # not -m: classes keep one name


@dataclass(frozen=True, slots=True)
class Place:
    """Where calls run: a working directory, and what stands in for folders on sys.path (`replaced` -> `by`)."""

    folder: str
    replaced: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A function `memir.module:name` and its arguments, which can be pickled, as can its result."""

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    place: Place = Place("")


def processors() -> int:
    """How many processes can run at once on this machine, as far as this process may use it."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run(calls: Sequence[Call], done: Callable[[int], None] = lambda _: None, limit: int | None = None) -> list[Any]:
    """What each call returned; a MemirError in its place where it raised one. `done` is told each finished call's number.

    At most `limit` processes (default: the processors) run at a time. Other errors of a call are raised as they are worded,
    as an internal error.
    """
    waiting: dict[Place, queue.SimpleQueue[int]] = {}
    for number, call in enumerate(calls):
        waiting.setdefault(call.place, queue.SimpleQueue()).put(number)
    answers: list[Any] = [None] * len(calls)
    slots = threading.BoundedSemaphore(limit or processors())
    workers = [_Worker(place) for place in waiting for _ in range(min(waiting[place].qsize(), limit or processors()))]

    def serve(worker: _Worker) -> None:
        while True:
            with slots:
                try:
                    number = waiting[worker.place].get_nowait()
                except queue.Empty:
                    break
                try:
                    answers[number] = worker.ask(calls[number])
                except Exception as error:  # a thread's boundary: an answer that cannot be read is a bug, and is said
                    answers[number] = MemirError(f"{type(error).__name__}: {error}", where=calls[number].function)
                done(number)
        worker.close()

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # in short waits, so that Ctrl-C is heard
                thread.join(0.2)
    finally:
        for worker in workers:
            worker.kill()
    return answers


class _Worker:
    """One process, started at its first call."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def ask(self, call: Call) -> Any:
        """The answer of one call, an error where there is none."""
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, (call.function, dict(call.arguments)))
            answer = _receive(process.stdout)
        except (OSError, EOFError):
            return self._died()
        if isinstance(answer, _Refusal):
            return answer.error()
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
            here = str(Path(__file__).parents[1])
            path = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, self.place.replaced, self.place.by],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=self.place.folder or None,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        return self._process

    def _died(self) -> InconclusiveError:
        assert self._process is not None
        assert self._log is not None
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").strip().splitlines()[-6:]
        self._process = None
        return InconclusiveError(
            f"the process that traced it ended without a result (exit code {code})",
            where="\n".join(tail),
            hint="out of memory?  a smaller batch or sequence, or fewer processes" if code < 0 else "",
        )

    def close(self) -> None:
        """Let the process end by itself."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End it, and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill() if process.poll() is None else None
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None and not stream.closed:
                    stream.close()
        if self._log is not None:
            self._log.close()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An error of a call as plain parts."""

    kind: str
    message: str
    where: str = ""
    hint: str = ""

    def error(self) -> MemirError:
        """The error again."""
        kinds: dict[str, type[MemirError]] = {"usage": UsageError, "inconclusive": InconclusiveError}
        return kinds.get(self.kind, MemirError)(self.message, where=self.where, hint=self.hint)


def _send(stream: IO[bytes], what: Any) -> None:
    data = pickle.dumps(what)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def serve(replaced: str, by: str) -> None:
    """The process's side: calls from stdin, answers to stdout, until stdin ends. What else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if replaced:
        sys.path[:] = [_moved(entry, replaced, by) for entry in sys.path]
    while True:
        try:
            function, arguments = _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(answers, _answer(function, arguments))


def _moved(entry: str, replaced: str, by: str) -> str:
    """A folder on sys.path below `replaced` as the one below `by`; memir's own, and installed packages, stay."""
    path = Path(entry or ".").resolve()
    own = Path(__file__).resolve().parents[1]
    if not path.is_relative_to(replaced) or path == own or {"site-packages", "dist-packages", "lib"} & set(path.parts):
        return entry
    return str(Path(by) / path.relative_to(replaced))


def _answer(function: str, arguments: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(**arguments)
    except UsageError as error:
        return _Refusal("usage", error.message, error.where, error.hint)
    except InconclusiveError as error:
        return _Refusal("inconclusive", error.message, error.where, error.hint)
    except MemirError as error:
        return _Refusal("internal", error.message, error.where, error.hint)
    except Exception as error:  # the process's boundary; the parent says that it is a bug
        return _Refusal("internal", f"{type(error).__name__}: {error}", function)
