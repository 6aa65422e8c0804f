"""Activations of the frozen prefix, kept by sample: written in one background thread, read ahead of need in another.

Nothing here may cost a training run: whatever goes wrong after the start (a full disk, a folder that became read-only, one of
another model, a layer that cannot be skipped) turns the cache off, once and with a message, and the prefix is computed again.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memir.errors import MemirError, UsageError
from memir.runtime.freezing.buffers import filled
from memir.runtime.freezing.distributed import rank
from memir.runtime.freezing.host import FullError, HostStore, unwritable
from memir.runtime.freezing.samples import Samples

if TYPE_CHECKING:
    from memir.runtime.freezing.disk import DiskStore

LOG = logging.getLogger("memir.freezing")
_IN_FLIGHT = 64  # activations that may wait for the writer; then the training waits


@dataclass(frozen=True, slots=True)
class Found:
    """A batch's activations after layer `cut` - 1: [B, S, width]."""

    cut: int
    hidden: Tensor


class ActivationCache:
    """Where `AutoFreeze` and `FrozenPrefix` keep the activations of the frozen layers.

    folder      a folder of this run, on a disk; None: host memory
    layout      "packed": activations end to end, without padding; "padded": a place of `max_tokens` each, so that the room
                is known before the first is written: with `samples` it is asked for at once
    max_nbytes  beyond it nothing more is written; default: the disk's end, or half of the host's memory that is free now,
                shared by this machine's processes
    depth       batches that are read ahead

    UsageError at once where the folder cannot be made or written, or has too little room for `samples`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        layout: str = "packed",
        max_tokens: int = 0,
        samples: int = 0,
        max_nbytes: int | None = None,
        depth: int = 2,
    ) -> None:
        if layout not in ("packed", "padded"):
            raise UsageError(f"layout={layout!r} of an activation cache", hint="packed, padded")
        if (layout == "padded") != (max_tokens > 0):
            raise UsageError("max_tokens, a sample's largest number of tokens, is for layout='padded', which needs it")
        self.folder = None if folder is None else Path(folder)
        self.depth = depth
        self.problem = ""  # why it is off, if it is
        self.full = ""  # why nothing more is written, if nothing is
        self.hits = self.misses = 0  # batches
        self.ahead = 0  # of the hits, those read before they were asked for
        self._max_tokens, self._samples, self._max_nbytes = max_tokens, samples, max_nbytes
        self._stores: dict[int, HostStore | DiskStore] = {}  # by cut, the newest last
        self._ahead: OrderedDict[tuple[bytes, ...], Future[Found | None]] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "memir-read")
        self._writer = ThreadPoolExecutor(1, "memir-write")
        self._room = threading.Semaphore(_IN_FLIGHT)
        if self.folder is not None:
            _probe(self.folder)
        elif max_nbytes is None:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            self._max_nbytes = free // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def nbytes(self) -> int:
        """Bytes of activations kept, of all cuts."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def damaged(self) -> int:
        """Activations that failed their checksum and were computed again."""
        return sum(getattr(store, "damaged", 0) for store in self._stores.values())

    @property
    def is_on(self) -> bool:
        """Whether it has had no problem."""
        return not self.problem

    @property
    def samples(self) -> int:
        """Samples kept for the newest cut."""
        return len(self._newest[1]) if self._stores else 0

    def open(self, fingerprint: str, cut: int, width: int, dtype: torch.dtype) -> None:
        """Begins to keep activations after layer `cut` - 1; keeps those of one earlier cut to start from, drops older ones.

        UsageError: the folder's activations for this cut are of another model.
        """
        self._forget()
        if cut in self._stores:
            return
        if self.folder is None:
            self._stores[cut] = HostStore(self._max_nbytes or 0)
        else:
            from memir.runtime.freezing.disk import DiskStore, Header

            header = Header(fingerprint, cut, width, str(dtype).removeprefix("torch."), self._max_tokens)
            self._stores[cut] = DiskStore(self.folder / f"cut-{cut}", header, rank(), self._max_nbytes)
            self._check_room(width * dtype.itemsize)
        for old in sorted(self._stores)[:-2]:
            self._stores.pop(old).remove()

    def announce(self, samples: Samples) -> None:
        """Reads a batch that will be asked for soon, in the background."""
        if self.is_on and self._stores and samples.keys not in self._ahead:
            self._ahead[samples.keys] = self._reader.submit(self._read, samples)
            while len(self._ahead) > 2 * self.depth + 2:
                self._ahead.popitem(last=False)

    def take(self, samples: Samples) -> Found | None:
        """A batch's activations, from the newest cut that has them all; None: compute them."""
        if not (self.is_on and self._stores):
            return None
        future = self._ahead.pop(samples.keys, None)
        found: Found | None = None
        try:
            if future is not None:
                found = future.result()
                self.ahead += found is not None
            cut, newest = self._newest
            if found is None or (found.cut < cut and newest.has_all(samples.keys)):
                found = self._read(samples) or found
        except Exception as error:  # of whatever kind: the training goes on without
            self.turn_off(f"activations cannot be read: {type(error).__name__}: {error}")
        self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
        return found

    def put(self, samples: Samples, hidden: Tensor) -> None:
        """Writes a batch's activations [B, S, width] of the newest cut, in the background."""
        if self.problem or self.full or not self._stores:
            return
        _, store = self._newest
        host = hidden.detach().to("cpu")
        for key, tokens, row in zip(samples.keys, samples.lengths, host, strict=True):
            self._room.acquire()
            try:
                done = self._writer.submit(self._write, store, key, row[:tokens].clone())
            except BaseException:
                self._room.release()
                raise
            done.add_done_callback(lambda _: self._room.release())

    def flush(self) -> None:
        """Waits until everything that was put is written."""
        self._writer.submit(lambda: None).result()

    def turn_off(self, problem: str) -> None:
        """Uses no activation any more; says why, once."""
        if not self.problem:
            self.problem = problem
            LOG.warning("the activation cache is off, frozen layers are computed again from here on: %s", problem)

    def close(self) -> None:
        """Ends the threads and closes the files, which stay; host memory is given back."""
        self._reader.shutdown()
        self._writer.shutdown()
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self.problem = self.problem or "closed"

    # -- in the background

    @property
    def _newest(self) -> tuple[int, HostStore | DiskStore]:
        cut = max(self._stores)
        return cut, self._stores[cut]

    def _read(self, samples: Samples) -> Found | None:
        for cut in sorted(self._stores, reverse=True):
            store = self._stores[cut]
            if not store.has_all(samples.keys):
                continue
            tensors = [store.get(key) for key in samples.keys]
            good = [t for t, n in zip(tensors, samples.lengths, strict=True) if t is not None and t.shape[0] == n]
            if len(good) == len(tensors):
                return Found(cut, filled(good, samples.length))
        return None

    def _write(self, store: HostStore | DiskStore, key: bytes, tensor: Tensor) -> None:
        if self.problem or self.full:
            return
        try:
            store.put(key, tensor)
        except FullError as error:
            self.full = str(error)
            LOG.warning("the activation cache takes no more, samples that are not in it are computed: %s", error)
        except Exception as error:  # of whatever kind: it happens in a thread, and nobody else would hear of it
            self.turn_off(str(error) if isinstance(error, MemirError) else f"{type(error).__name__}: {error}")

    def _forget(self) -> None:
        """Ends what is under way before the stores change."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._reader.submit(lambda: None).result()
        self.flush()

    def _check_room(self, token_nbytes: int) -> None:
        if self.folder is None or not (self._samples and self._max_tokens):
            return
        needed = self._samples * self._max_tokens * token_nbytes
        free = shutil.disk_usage(self.folder).free + self._newest[1].nbytes
        if needed > free:
            raise UsageError(
                f"the cache's folder has no room: {self._samples:,} samples of {self._max_tokens} tokens "
                f"take {needed:,} bytes, free are {free:,}",
                where=str(self.folder),
            )


def _probe(folder: Path) -> None:
    """UsageError unless a file can be written in the folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"memir")
    except OSError as error:
        raise unwritable(folder, error) from None
