"""Cached activations in a folder and in memory: written once, whole after a kill at any moment, never another model's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memir.errors import UsageError
from memir.freezing import ActivationCache
from memir.runtime.freezing.disk import DiskStore, Header
from memir.runtime.freezing.host import FullError, HostStore
from memir.runtime.freezing.samples import Samples

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 8
RECORD = 40  # bytes


def header(**changes: object) -> Header:
    return Header(**({"fingerprint": "f", "cut": 2, "width": WIDTH, "dtype": "float32", "max_tokens": 0} | changes))  # type: ignore[arg-type]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def activation(number: int, tokens: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((tokens, WIDTH), generator=torch.Generator().manual_seed(number)).to(dtype)


def samples(*numbers: int, tokens: int = 5) -> Samples:
    return Samples(tuple(map(key, numbers)), (tokens,) * len(numbers), tokens)


def same(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_tokens", [0, 9])
def test_what_was_written_is_read(tmp_path: Path, dtype: torch.dtype, max_tokens: int) -> None:
    of = header(dtype=str(dtype).removeprefix("torch."), max_tokens=max_tokens)
    store = DiskStore(tmp_path, of, rank=0)
    for number in range(4):
        store.put(key(number), activation(number, number * 3, dtype))
    store.put(key(1), activation(99, 3, dtype))  # written once
    for reader in (store, DiskStore(tmp_path, of, rank=1)):
        assert len(reader) == 4
        assert all(same(reader.get(key(n)), activation(n, n * 3, dtype)) for n in range(4))
        assert reader.get(key(7)) is None
        assert reader.nbytes == 18 * WIDTH * dtype.itemsize
    assert store.has_all([key(0), key(3)])
    assert not store.has_all([key(0), key(7)])


def test_ranks_see_what_others_write_later(tmp_path: Path) -> None:
    one, other = (DiskStore(tmp_path, header(), rank) for rank in (0, 1))
    for number in range(6):
        (one, other)[number % 2].put(key(number), activation(number, 300))  # beyond what is mapped already
        assert one.has_all([key(number)])
        assert other.has_all([key(number)])
        assert same(one.get(key(number)), activation(number, 300))
        assert same(other.get(key(number)), activation(number, 300))


KILLED = """
import os, signal, sys
from pathlib import Path
from memir.runtime.freezing import disk
from tests.test_freezing_cache import activation, header, key
folder, die_at, kept = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
real, calls = os.pwrite, 0
def pwrite(handle, view, offset):
    global calls
    calls += 1
    if calls == die_at:
        real(handle, view[:kept], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(handle, view, offset)
os.pwrite = pwrite
store = disk.DiskStore(folder, header(), rank=0)
for number in range(4):
    store.put(key(number), activation(number))
"""


@pytest.mark.parametrize(
    ("die_at", "kept", "whole"),
    [
        (5, 70, 2),  # in the middle of the third activation
        (6, 0, 2),  # between it and its record
        (6, 17, 2),  # in the middle of its record
        (6, RECORD, 3),  # after it
    ],
)
def test_a_process_that_is_killed_while_it_writes(tmp_path: Path, die_at: int, kept: int, whole: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(die_at), str(kept)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    store = DiskStore(tmp_path, header(), rank=0)  # its lock is gone with it
    assert len(store) == whole
    for number in range(4):
        assert (store.get(key(number)) is not None) == (number < whole)
        store.put(key(number), activation(number))
    store.close()
    again = DiskStore(tmp_path, header(), rank=0)
    assert all(same(again.get(key(number)), activation(number)) for number in range(4))
    assert (tmp_path / "data-0.bin").stat().st_size == 4 * 5 * WIDTH * 4  # what was half written is written over
    assert again.damaged == 0


def test_a_record_whose_data_never_reached_the_disk_is_not_believed(tmp_path: Path) -> None:
    """As after a power cut: the index is newer than the data, which ends early or holds other bytes."""
    store = DiskStore(tmp_path, header(), rank=0)
    for number in range(3):
        store.put(key(number), activation(number))
    store.close()
    with (tmp_path / "data-0.bin").open("r+b") as file:
        file.seek(1 * 5 * WIDTH * 4 + 11)
        file.write(b"\\xff")
        file.truncate(2 * 5 * WIDTH * 4 + 60)
    again = DiskStore(tmp_path, header(), rank=0)
    assert [again.get(key(n)) is not None for n in range(3)] == [True, False, False]
    assert again.damaged == 2
    again.put(key(1), activation(1))
    again.put(key(2), activation(2))
    again.close()
    last = DiskStore(tmp_path, header(), rank=0)
    assert all(same(last.get(key(n)), activation(n)) for n in range(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fingerprint": "g"}, "of another model, or of this one with other frozen weights"),
        ({"width": 16}, "differ in width"),
        ({"dtype": "float16", "fingerprint": "g"}, "differ in fingerprint, dtype"),
    ],
)
def test_another_models_folder(tmp_path: Path, change: dict[str, object], says: str) -> None:
    DiskStore(tmp_path, header(), rank=0).close()
    with pytest.raises(UsageError, match=says):
        DiskStore(tmp_path, header(**change), rank=1)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "header.json").write_text("not json")
    with pytest.raises(UsageError, match="differ in fingerprint, cut"):
        DiskStore(tmp_path, header(), rank=0)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    kept = DiskStore(tmp_path, header(), rank=0)
    with pytest.raises(UsageError, match="another process with rank 0 writes"):
        DiskStore(tmp_path, header(), rank=0)
    assert len(kept) == 0


def test_removing_is_done_by_the_last(tmp_path: Path) -> None:
    one, other = (DiskStore(tmp_path / "cut-2", header(), rank) for rank in (0, 1))
    one.remove()
    assert (tmp_path / "cut-2").exists()
    other.remove()
    assert not (tmp_path / "cut-2").exists()


def test_host_memory() -> None:
    store = HostStore(max_nbytes=2 * 5 * WIDTH * 4)
    row = activation(0)
    store.put(key(0), row)
    row.zero_()
    store.put(key(0), row)  # written once
    assert same(store.get(key(0)), activation(0))
    store.put(key(1), activation(1))
    with pytest.raises(FullError, match="max_nbytes"):
        store.put(key(2), activation(2))
    assert store.nbytes == 320
    assert (store.has_all([key(0), key(1)]), store.has_all([key(2)])) == (True, False)


# -- the cache over them: nothing here may end a training


def opened(cache: ActivationCache, cut: int = 2) -> ActivationCache:
    cache.open("f", cut, WIDTH, torch.float32)
    return cache


def batch(*numbers: int) -> Tensor:
    return torch.stack([activation(n) for n in numbers])


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_batch_is_found_when_all_of_it_was_written(tmp_path: Path, on_disk: bool) -> None:
    cache = opened(ActivationCache(tmp_path / "a" if on_disk else None))
    cache.put(samples(0, 1), batch(0, 1))
    cache.put(samples(2, 1), batch(2, 1))
    cache.flush()
    assert (cache.samples, cache.nbytes) == (3, 3 * 160)
    for ahead in (True, False):
        if ahead:
            cache.announce(samples(2, 0))
        found = cache.take(samples(2, 0))
        assert found is not None
        assert torch.equal(found.hidden, batch(2, 0))
    assert cache.take(samples(0, 7)) is None
    assert (cache.hits, cache.misses) == (2, 1)
    cache.close()


def test_a_batch_of_other_length_has_zeros_behind_its_rows(tmp_path: Path) -> None:
    cache = opened(ActivationCache(tmp_path))
    rows = Samples((key(0), key(1)), (5, 3), 5)
    cache.put(rows, batch(0, 1))
    cache.flush()
    found = cache.take(Samples((key(1), key(0)), (3, 5), 7))
    assert found is not None
    assert found.hidden.shape == (2, 7, WIDTH)
    assert torch.equal(found.hidden[0, :3], activation(1)[:3])
    assert torch.equal(found.hidden[1, :5], activation(0))
    assert not found.hidden[0, 3:].any()
    cache.close()


def test_an_earlier_cut_is_kept_until_the_next_but_one(tmp_path: Path) -> None:
    cache = opened(ActivationCache(tmp_path), 1)
    cache.put(samples(0), batch(0))
    opened(cache, 2)
    found = cache.take(samples(0))
    assert found is not None
    assert found.cut == 1
    cache.put(samples(0), batch(5))
    cache.flush()
    found = cache.take(samples(0))
    assert found is not None
    assert (found.cut, torch.equal(found.hidden, batch(5))) == (2, True)
    opened(cache, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut-2", "cut-3"]
    cache.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's /dev/full")
def test_a_full_disk_stops_the_writing_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = opened(ActivationCache(tmp_path))
    cache.put(samples(0), batch(0))
    cache.flush()
    store = cache._stores[2]
    assert isinstance(store, DiskStore)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, store._data)
    for number in (1, 2):
        cache.put(samples(number), batch(number))
    cache.flush()
    assert "no room for more activations" in cache.full
    assert cache.is_on
    assert cache.take(samples(1)) is None
    assert cache.take(samples(0)) is not None
    assert len(caplog.records) == 1  # said once
    os.close(full)
    cache.close()


def test_max_nbytes_on_disk(tmp_path: Path) -> None:
    cache = opened(ActivationCache(tmp_path, max_nbytes=400))
    cache.put(samples(0, 1, 2), batch(0, 1, 2))
    cache.flush()
    assert "max_nbytes=400" in cache.full
    assert cache.samples == 2
    cache.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="activations cannot be written"):
            ActivationCache(folder)


def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the beginning, and from the next cut on; said by the system, since root may write to any folder."""
    cache = opened(ActivationCache(tmp_path))
    real = os.open

    def read_only(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(UsageError, match="activations cannot be written: Read-only file system"):
        ActivationCache(tmp_path)
    with pytest.raises(UsageError, match="activations cannot be written: Read-only file system"):
        opened(cache, 3)
    cache.close()


def test_writing_that_fails_later_turns_it_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = opened(ActivationCache(tmp_path))
    store = cache._stores[2]
    assert isinstance(store, DiskStore)
    read_only = os.open(tmp_path / "cut-2" / "header.json", os.O_RDONLY)
    os.dup2(read_only, store._data)
    cache.put(samples(0, 1), batch(0, 1))
    cache.flush()
    assert "activations cannot be written: Bad file descriptor" in cache.problem
    assert cache.take(samples(0)) is None
    assert len(caplog.records) == 1
    os.close(read_only)
    cache.close()


def test_room_for_all_samples_is_asked_for_at_once(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path, layout="padded", max_tokens=2048, samples=10**12)
    with pytest.raises(
        UsageError, match=r"no room: 1,000,000,000,000 samples of 2048 tokens take 65,536,000,000,000,000 bytes"
    ):
        opened(cache)


@pytest.mark.parametrize("options", [{"layout": "ragged"}, {"layout": "padded"}, {"max_tokens": 4}])
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"layout|max_tokens"):
        ActivationCache(**options)  # type: ignore[arg-type]
