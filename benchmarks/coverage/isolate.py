"""One call in a forked child: a crash or a hang of one model type does not reach the others, and imports are paid once."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class ChildError(Exception):
    """The child ended without an answer: it took too long, or it died."""


def isolated(function: Callable[..., Result], *args: object, timeout: float) -> Result:
    """`function(*args)` in a forked child, at most `timeout` seconds. The result must pickle. ChildError if there is none."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        status = 1
        try:
            with os.fdopen(sending, "wb") as stream:
                pickle.dump(function(*args), stream)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    data, ended = _read_until(receiving, time.monotonic() + timeout)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not ended:
        raise ChildError(f"no answer within {timeout:g} s")
    if status != 0:
        raise ChildError(f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    result: Result = pickle.loads(data)
    return result


def _read_until(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """What the pipe gives until its end, and whether the end came before the deadline."""
    chunks: list[bytes] = []
    try:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0]:
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    return b"".join(chunks), True
                chunks.append(chunk)
        return b"", False
    finally:
        os.close(descriptor)
