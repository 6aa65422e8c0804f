"""Cyclic garbage, and when it is collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile, and what is there already (libraries, mostly) is set aside.

    For what makes many objects that live on, or die by their reference counts: going through them all again and again takes as
    long as making them.
    """
    was = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()
