"""Work that a forked copy of this process does meanwhile, on another core.

What cannot be forked, or ends there in whatever way, is done here instead: the answer is the same, only later.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Generic, TypeVar

import torch

T = TypeVar("T")
_ROOM = 2**20  # bytes; what Linux allows without privileges
OWN_THREAD = "memir-progress"  # it only writes to stderr, which the copy never does


def can_fork() -> bool:
    """Whether there is a second core, and no thread that might hold a lock in the copy."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    alone = threading.current_thread() is threading.main_thread() and all(thread.name == OWN_THREAD for thread in others)
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


class Beside(Generic[T]):
    """The results of `tasks`, which run in a copy of this process in order; they must be picklable, and change nothing else.

    Use it as a context: at its end the copy is gone.
    """

    def __init__(self, tasks: Sequence[Callable[[], T]], *, fork: bool) -> None:
        self._tasks = tasks
        self._results: list[T] = []
        self._child = 0
        self._answer: BinaryIO | None = None
        if fork and tasks and can_fork():
            self._start()

    def _start(self) -> None:
        reading, writing = os.pipe()
        import fcntl  # Linux alone gets here

        with suppress(OSError):  # room for a result, so that the copy goes on before it is read
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _ROOM)
        with warnings.catch_warnings():  # Python 3.12 counts the threads of numerical libraries, which the copy does not need
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if self._child:
            os.close(writing)
            self._answer = os.fdopen(reading, "rb")
            return
        try:  # the copy: whatever happens, it ends here
            os.close(reading)
            torch.set_num_threads(1)  # OpenMP's team was not copied: a parallel loop would wait for it forever
            with os.fdopen(writing, "wb") as file:
                for task in self._tasks:
                    file.write(pickle.dumps(task()))
                    file.flush()
        finally:
            os._exit(0)

    def __enter__(self) -> Beside[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def result(self, number: int) -> T:
        """What task `number` returned. Raises what it raises. Ask in order."""
        with suppress(EOFError, pickle.UnpicklingError):
            while self._answer is not None and len(self._results) <= number:
                self._results.append(pickle.load(self._answer))  # from our own copy
        return self._results[number] if number < len(self._results) else self._tasks[number]()
