"""Where the loaders build a model: on the meta device, without memory; or for real, for `memir verify`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_REAL: ContextVar[str | None] = ContextVar("memir_real_device", default=None)


@contextmanager
def on_real_device(device: str) -> Iterator[None]:
    """Within, `load_target` builds models with real, randomly initialized tensors on `device` ("cpu" or "cuda")."""
    token = _REAL.set(device)
    try:
        yield
    finally:
        _REAL.reset(token)


def build_device() -> str:
    """The device that models are built on now: "meta" unless `on_real_device` says otherwise."""
    return _REAL.get() or "meta"
