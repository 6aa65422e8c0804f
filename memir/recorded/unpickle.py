"""A pickle read as data: dicts, lists, tuples, strings, numbers, None. Whatever would call something is refused.

A pickle is a program for a small machine (pickletools.py): it can name any function and call it. Every such name goes through
`find_class` or `persistent_load`, and both refuse here; the extension registry is asked through `find_class` too.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import NoReturn

from memir.errors import UsageError

RECORD = "torch.cuda.memory._record_memory_history(); ...; torch.cuda.memory._dump_snapshot('mem.pickle')"


class RefusedError(pickle.UnpicklingError):
    """Something in the pickle is more than data."""


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedError(f"it names {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedError("it refers to something outside of it")


def read_pickle(path: Path) -> object:
    """The data in a pickle file. UsageError if the file cannot be read, is no pickle, or holds more than data."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return unpickle(data, str(path))


def unpickle(data: bytes, where: str) -> object:
    """The data in a pickle, of which nothing is executed; `where` is for the message. UsageError as `read_pickle`."""
    try:
        return _DataUnpickler(io.BytesIO(data)).load()
    except RefusedError as error:
        raise UsageError(
            f"{where} is not only data: {error}, and nothing of it was run",
            hint=f"a snapshot is made of numbers and texts:  {RECORD}",
        ) from None
    except Exception as error:  # a broken pickle ends in any error: a stack or a memo that lacks, a text that is not UTF-8
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{where} is no pickle, or a damaged one" + (f": {reason}" if reason else ""),
            hint=f"a snapshot is written by  {RECORD}",
        ) from None
