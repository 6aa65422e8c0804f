"""Cached activations in a folder: written once, read through a memory map, correct after a process was killed at any moment.

    cut-4/header.json    what they are activations of: fingerprint, width, dtype
    cut-4/data-0.bin     activations end to end (packed), or each in a place of max_tokens (padded), of the process with rank 0
    cut-4/index-0.bin    one record of 40 bytes for each, appended after its activation was written

Every process writes its own pair of files and reads all of them, so that ranks need no lock between them and the next epoch's
ranks find what others wrote. A record has a checksum of the activation and one of itself: a torn record, or one whose
activation never reached the disk, counts as not there. Writes go through `pwrite`, never through the map: a full disk is an
error there, and would be a SIGBUS here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from memir.errors import UsageError
from memir.runtime.freezing.buffers import bytes_of
from memir.runtime.freezing.host import FullError, unwritable

FORMAT = "memir activations 1"
_RECORD = struct.Struct("<16sQQII")  # key, offset, tokens, checksum of the activation, checksum of the record before it


@dataclass(frozen=True, slots=True)
class Header:
    """What a folder's activations belong to; two that differ never mix."""

    fingerprint: str
    cut: int
    width: int
    dtype: str  # "float32"
    max_tokens: int  # of each place in the padded layout, 0: packed
    format: str = FORMAT


@dataclass(slots=True)
class _Entry:
    writer: int
    offset: int
    tokens: int
    checksum: int


class _Files:
    """One process's pair of files, open for reading, and how far its index was read."""

    def __init__(self, folder: Path, number: int) -> None:
        self.index = os.open(folder / f"index-{number}.bin", os.O_RDONLY)
        self.data = os.open(folder / f"data-{number}.bin", os.O_RDONLY)
        self.seen = 0
        self.map: mmap.mmap | None = None

    def close(self) -> None:
        os.close(self.index)
        os.close(self.data)
        self.map = None


class DiskStore:
    """Activations [tokens, width] by sample, in `folder`, shared with the other processes of the run.

    UsageError: the folder is of another model, cut or format; cannot be written; a process with this rank writes there.
    """

    def __init__(self, folder: Path, header: Header, rank: int, max_nbytes: int | None = None) -> None:
        self.folder, self._header, self._rank, self._max_nbytes = folder, header, rank, max_nbytes
        self.damaged = 0
        self._dtype: torch.dtype = getattr(torch, header.dtype)
        self._token: int = header.width * self._dtype.itemsize  # bytes
        self._entries: dict[bytes, _Entry] = {}
        self._files: dict[int, _Files] = {}
        self._refreshing = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._agree()
            self._index = os.open(folder / f"index-{rank}.bin", os.O_RDWR | os.O_CREAT, 0o644)
            self._data = os.open(folder / f"data-{rank}.bin", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise unwritable(folder, error) from None
        try:
            fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._index)
            os.close(self._data)
            raise UsageError(
                f"another process with rank {rank} writes activations there",
                where=str(folder),
                hint="give each run its own folder",
            ) from None
        except OSError:
            pass  # a file system without locks
        self._refresh(own=True)
        whole = self._files[rank].seen
        os.ftruncate(self._index, whole)  # a record that was cut off
        self._index_end = whole
        own = [entry for entry in self._entries.values() if entry.writer == rank]
        self._data_end = max((entry.offset + self._place(entry.tokens) for entry in own), default=0)

    def __len__(self) -> int:
        with self._refreshing:
            self._refresh()
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all activations here."""
        return sum(entry.tokens * self._token for entry in list(self._entries.values()))

    def has_all(self, keys: Iterable[bytes]) -> bool:
        """Whether every sample is here; looks once for what other processes have written."""
        missing = [key for key in keys if key not in self._entries]
        if missing:
            with self._refreshing:
                self._refresh()
        return all(key in self._entries for key in missing)

    def put(self, key: bytes, tensor: Tensor) -> None:
        """Writes a sample's activation, if it is not here yet. FullError: no room. UsageError: it cannot be written."""
        if key in self._entries:
            return
        tokens = tensor.shape[0]
        if self._header.max_tokens and tokens > self._header.max_tokens:
            raise FullError(f"a sample has {tokens} tokens, and places are for max_tokens={self._header.max_tokens}")
        plain = tensor.to("cpu").contiguous()
        if plain.dtype != self._dtype or plain.shape[1] != self._header.width:
            raise UsageError(
                f"an activation is {plain.dtype} of width {plain.shape[1]}", where=f"{self.folder}: {self._header}"
            )
        if self._max_nbytes is not None and self._data_end + tokens * self._token > self._max_nbytes:
            raise FullError(f"{self.folder} holds max_nbytes={self._max_nbytes:,} bytes of activations")
        view = bytes_of(plain) if tokens else memoryview(b"")
        entry = _Entry(self._rank, self._data_end, tokens, zlib.crc32(view))
        fields = (key, entry.offset, tokens, entry.checksum)
        record = _RECORD.pack(*fields, 0)[:-4]
        try:
            _write(self._data, view, entry.offset)
            _write(self._index, memoryview(record + zlib.crc32(record).to_bytes(4, "little")), self._index_end)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise FullError(f"no room for more activations in {self.folder}: {error.strerror}") from None
            raise unwritable(self.folder, error) from None
        self._index_end += _RECORD.size
        self._data_end += self._place(tokens)
        self._entries[key] = entry

    def get(self, key: bytes) -> Tensor | None:
        """A sample's activation, or None; one that fails its checksum is forgotten, and may be written again."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        tensor = self._read(entry)
        if tensor is None:
            self.damaged += 1
            self._entries.pop(key, None)
        return tensor

    def close(self) -> None:
        """Closes the files; the activations stay."""
        for files in self._files.values():
            files.close()
        self._files.clear()
        self._entries.clear()
        for handle in (self._index, self._data):
            os.close(handle)

    def remove(self) -> None:
        """Closes, and removes this process's files; the last process removes the folder."""
        self.close()
        for name in (f"index-{self._rank}.bin", f"data-{self._rank}.bin"):
            (self.folder / name).unlink(missing_ok=True)
        if not any(self.folder.glob("index-*.bin")):
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- files

    def _place(self, tokens: int) -> int:
        return (self._header.max_tokens or tokens) * self._token

    def _agree(self) -> None:
        """Writes the header, or finds that the one that is there says the same."""
        path = self.folder / "header.json"
        if not path.exists():
            aside = self.folder / f"header.{self._rank}.{os.getpid()}"
            aside.write_text(json.dumps(asdict(self._header)), encoding="utf-8")
            os.replace(aside, path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = {}
        differ = [name for name, value in asdict(self._header).items() if found.get(name) != value]
        if differ:
            what = "of another model, or of this one with other frozen weights" if differ == ["fingerprint"] else ""
            raise UsageError(
                f"the folder holds activations {what or 'that differ in ' + ', '.join(differ)}",
                where=str(self.folder),
                hint="give each run its own folder, or remove this one",
            )

    def _refresh(self, own: bool = False) -> None:
        """Reads what was appended to the other processes' indexes; with `own` to this one's, too, as it was left."""
        for path in sorted(self.folder.glob("index-*.bin")):
            number = int(path.stem.removeprefix("index-"))
            if number == self._rank and not own:
                continue
            if number not in self._files:
                try:
                    self._files[number] = _Files(self.folder, number)
                except OSError:
                    continue  # its writer has only just made the first of the two
            files = self._files[number]
            size = os.fstat(files.index).st_size
            text = os.pread(files.index, size - files.seen, files.seen) if size > files.seen else b""
            for start in range(0, len(text) - _RECORD.size + 1, _RECORD.size):
                record = text[start : start + _RECORD.size]
                key, offset, tokens, checksum, of_record = _RECORD.unpack(record)
                if zlib.crc32(record[:-4]) != of_record:
                    break
                self._entries[key] = _Entry(number, offset, tokens, checksum)
                files.seen += _RECORD.size

    def _read(self, entry: _Entry) -> Tensor | None:
        files = self._files[entry.writer]
        nbytes = entry.tokens * self._token
        if not nbytes:
            return torch.empty((0, self._header.width), dtype=self._dtype)
        end = entry.offset + nbytes
        if files.map is None or len(files.map) < end:
            if os.fstat(files.data).st_size < end:
                return None
            files.map = mmap.mmap(files.data, 0, access=mmap.ACCESS_READ)
        tensor = torch.empty((entry.tokens, self._header.width), dtype=self._dtype)
        view = bytes_of(tensor)
        with memoryview(files.map) as mapped:
            view[:] = mapped[entry.offset : end]
        return tensor if zlib.crc32(view) == entry.checksum else None


def _write(handle: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
