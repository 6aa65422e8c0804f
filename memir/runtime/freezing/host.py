"""Cached activations in host memory; and what may go wrong with either place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from memir.errors import UsageError


class FullError(Exception):
    """There is no room for another activation; the message says where and how much."""


def unwritable(folder: Path, error: OSError) -> UsageError:
    """The message for a folder that the system refuses."""
    return UsageError(
        f"activations cannot be written: {error.strerror}", where=str(folder), hint="give a folder that can be written to"
    )


class HostStore:
    """Activations [tokens, width] by sample, kept by this process only. Read and written by one thread each."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._entries: dict[bytes, Tensor] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_all(self, keys: Iterable[bytes]) -> bool:
        """Whether every sample is here."""
        return all(key in self._entries for key in keys)

    def put(self, key: bytes, tensor: Tensor) -> None:
        """Keeps a sample's activation, if it is not here yet. FullError beyond the limit."""
        if key in self._entries:
            return
        nbytes = tensor.numel() * tensor.element_size()
        if self.nbytes + nbytes > self._max_nbytes:
            raise FullError(f"host memory for cached activations is used up: {self._max_nbytes:,} bytes (max_nbytes)")
        self._entries[key] = tensor.clone()
        self.nbytes += nbytes

    def get(self, key: bytes) -> Tensor | None:
        """A sample's activation, or None."""
        return self._entries.get(key)

    def close(self) -> None:
        """Gives the memory back."""
        self._entries.clear()
        self.nbytes = 0

    remove = close
