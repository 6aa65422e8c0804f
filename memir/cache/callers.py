"""Who asks: whether a file, a folder or a variable is asked for by the user's code, by a library, or only to show lines."""

from __future__ import annotations

import importlib
import linecache
import os
from types import FrameType

from memir.cache.environment import is_library, is_memir


def asked_by_user(frame: FrameType | None) -> bool:
    """Whether the user's code runs and asks, itself or through a library; not if a library is only being imported by it."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith("<frozen importlib") or is_memir(filename):
            return False
        if not filename.startswith("<") and not is_library(filename):
            return True
        frame = frame.f_back
    return False


def imported_by_user(frame: FrameType | None) -> bool:
    """Whether a line of the user's code imports, itself."""
    while is_importlib(frame):
        assert frame is not None
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith("<") and not is_library(frame.f_code.co_filename)


def is_importlib(frame: FrameType | None) -> bool:
    """Whether Python's own import runs, or its importlib.metadata, which looks through every folder of sys.path."""
    return frame is not None and frame.f_code.co_filename.startswith(("<frozen importlib", os.path.dirname(importlib.__file__)))


def only_shown(frame: FrameType) -> bool:
    """Whether a source is read to show its lines; code that runs is imported as well."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename == linecache.__file__
