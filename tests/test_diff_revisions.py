"""Repositories in every state: a clear result or a clear error, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memir.diff.inputs import Pair, Question, of_revisions, trees
from memir.diff.revisions import Repository
from memir.errors import InconclusiveError, MemirError, UsageError
from memir.recipe import Recipe

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn
from {module} import WIDTH


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids, targets):
        logits = self.head(torch.tanh(self.tokens(ids)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def git(folder: Path, *words: str) -> str:
    plain = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *plain, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, message: str, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of a model: the second is wider, in a module that the first one imports."""
    folder = tmp_path / "a repository with blanks, é and 字"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "first", {"models/sizes.py": "WIDTH = 16\n", "models/tiny model.py": MODEL.format(module="sizes")})
    commit(folder, "second", {"models/sizes.py": "WIDTH = 24\n"})
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return folder


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Nothing of the repository changes within, its own folder included, and no temporary folder stays."""

    def state() -> list[tuple[str, int, bytes]]:
        files = sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return [(str(p), p.stat().st_mtime_ns, p.read_bytes()) for p in files]

    before = state()
    yield
    assert state() == before
    assert not list(folder.rglob("__pycache__"))
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def ask(base: str, head: str, target: str = "models/tiny model.py") -> Pair | MemirError:
    found = Repository.at(Path.cwd())
    assert found is not None
    question = Question(target, Recipe(), {"batch": 2, "seq": 8})
    with trees(found, base, head, lambda _: None) as both:
        (pair,) = of_revisions(both, [question], lambda _: None)
    return pair


def peaks(pair: Pair | MemirError) -> list[int]:
    assert isinstance(pair, Pair), pair
    assert pair.base is not None
    return [side.formula.evaluate(side.point)[0] for side in (pair.base, pair.head)]


def test_two_revisions_of_a_module_in_one_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository / "models")
    with untouched(repository):
        pair = ask("HEAD~1", "HEAD", "tiny model.py:Tiny")
    before, after = peaks(pair)
    assert before < after
    assert isinstance(pair, Pair)
    (hunk,) = pair.sources.hunks
    assert (hunk.file, pair.sources.text(hunk, 1)) == ("models/sizes.py", "WIDTH = 24")


def test_uncommitted_changes_are_the_working_tree(repository: Path) -> None:
    (repository / "models/sizes.py").write_text("WIDTH = 48\n")
    with untouched(repository):
        pair = ask("HEAD", ".")
    before, after = peaks(pair)
    assert before < after
    assert isinstance(pair, Pair)
    assert [pair.sources.text(hunk, 1) for hunk in pair.sources.hunks] == ["WIDTH = 48"]


def files(base: str, head: str, name: str) -> list[str]:
    """A file's text in both states."""
    found = Repository.at(Path.cwd())
    assert found is not None
    with trees(found, base, head, lambda _: None) as both:
        return [(folder / name).read_text() for folder in (both.base, both.head)]


def test_a_detached_head_and_a_hook_s_environment(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "checkout", "-q", "--detach", "HEAD~1")
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "other-index"))
    with untouched(repository):
        assert files("main", "HEAD", "models/sizes.py") == ["WIDTH = 24\n", "WIDTH = 16\n"]


def test_a_shallow_clone_says_how_to_get_the_rest(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", repository.as_uri(), str(tmp_path / "shallow"))
    monkeypatch.chdir(tmp_path / "shallow")
    with untouched(tmp_path / "shallow"), pytest.raises(UsageError) as caught:
        ask("HEAD~1", "HEAD")
    assert "HEAD~1" in caught.value.message
    assert "git fetch --unshallow" in caught.value.hint


def test_a_base_without_the_file_is_a_result(repository: Path) -> None:
    commit(repository, "new", {"models/new.py": MODEL.format(module="sizes")})
    with untouched(repository):
        pair = ask("HEAD~1", "HEAD", "models/new.py")
    assert isinstance(pair, Pair)
    assert pair.base is None
    assert pair.head.name == "Tiny"


def test_a_base_that_does_not_import_is_inconclusive_and_names_the_revision(repository: Path) -> None:
    (repository / "models/sizes.py").write_text("raise RuntimeError('half done')\n")
    commit(repository, "broken", {})
    commit(repository, "mended", {"models/sizes.py": "WIDTH = 16\n"})
    with untouched(repository):
        broken = ask("HEAD~1", "HEAD")
    assert isinstance(broken, InconclusiveError)
    assert broken.message.startswith("HEAD~1: ")
    assert "half done" in broken.where


def test_a_head_that_has_no_such_file_is_a_usage_error(repository: Path) -> None:
    with untouched(repository):
        found = ask("HEAD~1", "HEAD", "models/none.py")
    assert isinstance(found, UsageError)
    assert found.message.startswith("HEAD: ")


def test_a_submodule_s_files_are_there_too(repository: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q", "-b", "main")
    commit(inner, "inner", {"width.py": "WIDTH = 8\n"})
    git(repository, "submodule", "--quiet", "add", inner.as_uri(), "vendored")
    commit(repository, "with a submodule", {"top.py": MODEL.format(module="vendored.width")})
    commit(repository, "more", {"other.py": "x = 1\n"})
    with untouched(repository):
        assert files("HEAD~1", "HEAD", "vendored/width.py") == ["WIDTH = 8\n"] * 2


def test_what_is_no_revision(repository: Path) -> None:
    with untouched(repository):
        for name in ("no-such-branch", "--output=x", "HEAD:models/sizes.py"):
            with pytest.raises(UsageError, match="is no commit"):
                ask(name, "HEAD")


def test_a_renamed_file_is_followed(repository: Path) -> None:
    os.rename(repository / "models/sizes.py", repository / "models/widths.py")
    commit(repository, "renamed", {"models/tiny model.py": MODEL.format(module="widths")})
    found = Repository.at(repository)
    assert found is not None
    assert ("models/sizes.py", "models/widths.py") in found.changed("HEAD~1", "HEAD")


def test_a_folder_without_a_repository(tmp_path: Path) -> None:
    assert Repository.at(tmp_path) is None
