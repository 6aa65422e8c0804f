"""Cache files: whole or not at all, never believed when they are not memir's, bounded, and shared by processes."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import time
import zlib
from pathlib import Path

import pytest

from memir.cache import CacheWarning, store
from memir.cache.store import DamagedError, Store, Usage, read, write

KEY = "0123456789abcdef"
RECORD = "a record\n" * 500


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(store, "_SAID", set())
    return Store(tmp_path / "cache")


def files(kept: Store) -> list[Path]:
    return sorted(kept.folder.rglob("*.entry"))


def test_what_is_saved_is_read(kept: Store) -> None:
    kept.save(KEY, "2-16", "header", RECORD)
    kept.save("other", "2-16", "other header", "other")
    (entry,) = kept.entries(KEY)
    assert (entry.header, entry.record()) == ("header", RECORD)
    assert list(kept.entries("none")) == []
    assert kept.usage() == Usage(2, 2, sum(path.stat().st_size for path in files(kept)))
    assert [path.suffix for path in kept.folder.rglob("*") if path.is_file()] == [".entry", ".entry"]


def test_the_same_name_replaces(kept: Store) -> None:
    for record in ("first", "second"):
        kept.save(KEY, "2-16", "header", record)
    assert [entry.record() for entry in kept.entries(KEY)] == ["second"]


def test_any_changed_or_missing_byte_is_damage(kept: Store) -> None:
    kept.save(KEY, "2-16", "header", "record")
    (path,) = files(kept)
    whole = path.read_bytes()
    for index in range(len(whole)):
        for data in (whole[:index], whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :]):
            path.write_bytes(data)
            with pytest.raises(DamagedError):
                read(path)
    path.write_bytes(whole)
    assert read(path).record() == "record"


@pytest.mark.parametrize("packed", [b"no zlib", zlib.compress(b"\xff\xfe"), zlib.compress(b"cut")[:-3]])
def test_a_record_that_cannot_be_unpacked_is_damage(tmp_path: Path, packed: bytes) -> None:
    rest = b"header\n" + packed
    (tmp_path / "a").write_bytes(f"memir-cache 1 {hashlib.sha256(rest).hexdigest()}\n".encode() + rest)
    with pytest.raises(DamagedError):
        read(tmp_path / "a").record()


def test_a_record_that_unpacks_to_more_than_any_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", "header", RECORD)
    monkeypatch.setattr(store, "_LONGEST", len(RECORD) - 1)
    with pytest.raises(DamagedError):
        read(tmp_path / "a").record()


def test_damage_is_told_once_left_out_and_gone_after_the_next_save(kept: Store) -> None:
    for name in ("1-16", "2-16"):
        kept.save(KEY, name, name, RECORD)
    files(kept)[0].write_bytes(b"something else")
    with pytest.warns(CacheWarning, match=rf"not used: programs/{KEY}/1-16\.entry"):
        assert [entry.header for entry in kept.entries(KEY)] == ["2-16"]
    assert [entry.header for entry in kept.entries(KEY)] == ["2-16"]
    kept.save(KEY, "3-16", "3-16", RECORD)
    assert [path.name for path in files(kept)] == ["2-16.entry", "3-16.entry"]


def test_the_latest_used_come_first_and_the_others_give_way(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("a", "b", "c"), 1):
        kept.save(KEY, name, name, os.urandom(1000).hex())
        os.utime(files(kept)[-1], (time.time() - age * 60,) * 2)
    assert [entry.header for entry in kept.entries(KEY)] == ["a", "b", "c"]
    kept.used(next(path for path in files(kept) if path.stem == "c"))
    assert [entry.header for entry in kept.entries(KEY)] == ["c", "a", "b"]
    monkeypatch.setattr(store, "LIMIT", 3 * files(kept)[0].stat().st_size)
    kept.save("other", "d", "d", os.urandom(900).hex())
    assert [path.stem for path in files(kept)] == ["a", "c", "d"]
    monkeypatch.setattr(store, "PER_KEY", 1)
    kept.save(KEY, "e", "e", "small")
    assert [path.stem for path in files(kept)] == ["e", "d"]


def test_what_a_killed_process_left_goes_after_an_hour(kept: Store) -> None:
    kept.save(KEY, "a", "a", RECORD)
    old, new = kept.folder / "programs" / KEY / "old.tmp", kept.folder / "programs" / KEY / "new.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 4000,) * 2)
    kept.save(KEY, "b", "b", RECORD)
    assert (old.exists(), new.exists()) == (False, True)


def test_clear_removes_what_memir_wrote_and_nothing_else(kept: Store) -> None:
    for name in ("a", "b"):
        kept.save(KEY, name, name, RECORD)
    mine = kept.folder / "programs" / "mine.txt"
    mine.touch()
    before = kept.usage()
    assert kept.clear() == before
    assert [path for path in kept.folder.rglob("*") if path.is_file()] == [mine]
    mine.unlink()
    kept.clear()
    assert not kept.folder.exists()
    assert kept.clear() == Usage(0, 0, 0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "`memir cache clear` makes room"),
        (errno.EROFS, "MEMIR_CACHE_DIR names another folder, --no-cache does without"),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_what_the_file_system_refuses_is_one_warning(
    kept: Store, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(CacheWarning, match=message):
        kept.save(KEY, "a", "header", RECORD)
    kept.save(KEY, "b", "header", RECORD)  # pytest makes a warning an error
    assert [path for path in kept.folder.rglob("*") if path.is_file()] == []


def _write_and_read(folder: str, rounds: int) -> None:
    kept = Store(Path(folder))
    for turn in range(rounds):
        kept.save(KEY, f"{turn % 3}", f"header {turn % 3}", RECORD * (1 + turn % 3))
        for entry in kept.entries(KEY):
            assert entry.record() == RECORD * (1 + int(entry.header[-1]))
        if turn % 20 == 19:
            kept.clear()


def test_processes_that_write_read_and_clear_at_once_do_no_harm(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_and_read, args=(str(tmp_path), 60)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".entry"] == []


def test_the_folder_is_the_users_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import platformdirs

    monkeypatch.setenv("MEMIR_CACHE_DIR", str(tmp_path))
    assert store.cache_folder() == tmp_path
    monkeypatch.delenv("MEMIR_CACHE_DIR")
    assert store.cache_folder() == Path(platformdirs.user_cache_dir("memir", appauthor=False))
