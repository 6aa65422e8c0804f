"""What a watch sees of the code that runs within, and that it leaves the process as it was."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from memir.cache import manifest as manifest_module
from memir.cache.manifest import Manifest, hashed
from memir.cache.watch import Watch

SOURCE = """
import glob, os
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))

def read(name):
    with open(os.path.join(HERE, name)) as file:
        return file.read()

def write(name):
    open(os.path.join(HERE, name), "w").close()

def exists(name):
    return os.path.exists(os.path.join(HERE, name)), Path(HERE, name).is_file()

def variable(name):
    return os.environ.get(name), name in os.environ, os.getenv(name)

def listed(name):
    return sorted(glob.glob(os.path.join(HERE, name, "*")))

def optional(name):
    try:
        return __import__(name)
    except ImportError:
        return None
"""


@pytest.fixture(autouse=True)
def without_models_of_other_tests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that earlier tests wrote and imported in this process are newer than it: no manifest would be right."""
    written = str(tmp_path_factory.getbasetemp().parent) + os.sep
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and (path.startswith(written) or not os.path.exists(path)):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module, as a model's is: nobody finds it in sys.modules. Its file is older than this process."""
    path = tmp_path / "users_code.py"
    path.write_text(SOURCE)
    os.utime(path, (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location("users_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watched(run: Callable[[], object]) -> Manifest:
    with Watch() as watch:
        run()
    found = watch.manifest(relative=False)
    assert found is not None
    assert found.holds()
    return found


def test_the_process_is_as_it_was_also_after_an_error(code: ModuleType) -> None:
    def state() -> tuple[object, ...]:
        return (os.stat, type(os.environ), list(sys.meta_path), set(os.supports_fd), set(os.supports_follow_symlinks))

    def fail() -> None:
        with Watch():
            assert state() != before
            raise ZeroDivisionError

    before = state()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert state() == before
    with Watch(), Watch():
        code.variable("HOME")
    assert state() == before


def test_a_file_that_is_read_is_compared(code: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    found = watched(lambda: code.read("a.txt"))
    assert str(tmp_path / "a.txt") in found.files
    (tmp_path / "a.txt").write_text("two")
    assert not found.holds()
    (tmp_path / "a.txt").write_text("one")
    assert found.holds()
    (tmp_path / "a.txt").unlink()
    assert not found.holds()


def test_a_large_file_is_known_by_size_and_time(code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "_LARGE", 2)
    (tmp_path / "weights").write_text("three")
    found = watched(lambda: code.read("weights"))
    os.utime(tmp_path / "weights", (1, 1))
    assert not found.holds()


def test_a_file_that_changes_or_goes_meanwhile_leaves_no_manifest(code: ModuleType, tmp_path: Path) -> None:
    for change in (lambda path: path.write_text("two"), lambda path: path.unlink()):
        (tmp_path / "a.txt").write_text("one")
        with Watch() as watch:
            code.read("a.txt")
            change(tmp_path / "a.txt")
        assert watch.manifest(relative=False) is None


def test_a_file_that_is_only_written_does_not_count(code: ModuleType, tmp_path: Path) -> None:
    found = watched(lambda: code.write("log.txt"))
    assert str(tmp_path / "log.txt") not in {**found.files, **found.exists}


def test_a_file_that_is_asked_for_counts_whether_there_or_not(code: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    found = watched(lambda: (code.exists("there"), code.exists("absent")))
    assert found.exists[str(tmp_path / "there")]
    assert not found.exists[str(tmp_path / "absent")]
    (tmp_path / "absent").touch()
    assert not found.holds()


def test_a_file_that_is_opened_in_vain_counts(code: ModuleType, tmp_path: Path) -> None:
    def attempt() -> None:
        with pytest.raises(FileNotFoundError):
            code.read("absent")

    found = watched(attempt)
    (tmp_path / "absent").touch()
    assert not found.holds()


def test_variables_are_kept_as_digests(code: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "the secret")
    monkeypatch.delenv("ABSENT", raising=False)
    found = watched(lambda: (code.variable("SECRET"), code.variable("ABSENT"), os.environ.get("HOME")))
    assert found.variables["SECRET"] == hashed("the secret")
    assert found.variables["ABSENT"] is None
    assert "the secret" not in str(found.to_data())
    monkeypatch.setenv("ABSENT", "")
    assert not found.holds()


def test_a_folder_that_is_listed_counts_by_its_names(code: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    found = watched(lambda: code.listed("parts"))
    (tmp_path / "other.txt").touch()
    assert found.holds()
    (tmp_path / "parts" / "a").touch()
    assert not found.holds()


@pytest.mark.parametrize("new", ["no_such_thing.py", "no_such_thing/__init__.py", "no_such_thing/inside.txt"])
def test_a_module_that_was_looked_for_in_vain_counts(code: ModuleType, tmp_path: Path, new: str) -> None:
    found = watched(lambda: code.optional("no_such_thing"))
    (tmp_path / "another.py").touch()
    assert found.holds()
    (tmp_path / new).parent.mkdir(exist_ok=True)
    (tmp_path / new).touch()
    assert not found.holds()


def test_a_module_imported_from_its_bytecode_counts_by_its_source(code: ModuleType, tmp_path: Path) -> None:
    import py_compile

    (tmp_path / "helper_of_users.py").write_text("A = 1\n")
    py_compile.compile(str(tmp_path / "helper_of_users.py"))
    found = watched(lambda: code.optional("helper_of_users"))
    sys.modules.pop("helper_of_users")
    assert str(tmp_path / "helper_of_users.py") in found.files


def test_compiled_modules_and_libraries_count(tmp_path: Path) -> None:
    for name in ("extension.so", "library.so"):
        (tmp_path / name).touch()
    found = watched(
        lambda: (
            sys.audit("import", "extension", str(tmp_path / "extension.so"), None, None, None),
            sys.audit("ctypes.dlopen", str(tmp_path / "library.so")),
            sys.audit("ctypes.dlopen", None),
        )
    )
    assert {str(tmp_path / "extension.so"), str(tmp_path / "library.so")} <= set(found.files)


def test_a_module_that_may_be_older_than_its_file_leaves_no_manifest(
    code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users_code", code)
    assert str(tmp_path / "users_code.py") in watched(lambda: None).files
    os.utime(tmp_path / "users_code.py")
    with Watch() as watch:
        pass
    assert watch.manifest(relative=False) is None


def test_sources_of_the_model_libraries_count_and_other_libraries_do_not() -> None:
    import transformers.models.gpt2.modeling_gpt2 as modeling

    found = watched(lambda: None)
    assert modeling.__file__ in found.files
    assert not any(f"{os.sep}torch{os.sep}" in path or f"{os.sep}memir{os.sep}cache{os.sep}" in path for path in found.files)


def test_functions_that_look_at_what_stat_can_do_still_work(code: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    os.symlink(tmp_path / "a", tmp_path / "link")
    with Watch():
        shutil.copy2(tmp_path / "link", tmp_path / "copy", follow_symlinks=False)
    assert (tmp_path / "copy").is_symlink()


def test_a_manifest_reads_back_and_other_data_is_refused() -> None:
    found = Manifest({"a": "b"}, {"c": True}, {"d": "e"}, {"f": (["g"], [])}, {"h": None}, "/")
    assert Manifest.from_data(found.to_data()) == found
    for data in ({}, found.to_data() | {"more": 1}, found.to_data() | {"files": 3}):
        with pytest.raises((ValueError, TypeError)):
            Manifest.from_data(data)
