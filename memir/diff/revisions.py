"""Two states of a git repository: a revision written into a temporary folder, and the files that differ.

Nothing of the repository is touched, its index and its list of worktrees included: a revision's files are written with an index
of their own (`git read-tree`, `git checkout-index`), without hooks. Submodules whose commit is there are written too.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memir.errors import UsageError

WORKING_TREE = "."


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository: the top folder of its working tree, and its own folder."""

    top: Path
    git_dir: Path

    @staticmethod
    def at(folder: Path) -> Repository | None:
        """The repository that a folder lies in; None where there is none, or no git."""
        try:
            found = _git(["rev-parse", "--show-toplevel", "--absolute-git-dir"], folder)
        except (UsageError, FileNotFoundError):
            return None
        top, git_dir = found.rstrip("\n").split("\n")
        return Repository(Path(top), Path(git_dir))

    def commit(self, revision: str) -> str | None:
        """The commit that a revision names; None if it names none here."""
        if revision.startswith("-"):
            return None
        try:
            return (
                _git(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"], self.top).strip()
                or None
            )
        except UsageError:
            return None

    def known(self, revision: str) -> str:
        """The commit of a revision; UsageError, with what to type, if there is none."""
        found = self.commit(revision)
        if found is not None:
            return found
        hint = "git log --oneline  lists commits; write  .  for the working tree"
        if _git(["rev-parse", "--is-shallow-repository"], self.top).strip() == "true":
            hint = f"this clone is shallow:  git fetch --unshallow  (or  git fetch --depth=100 origin {revision})"
        raise UsageError(f"{revision!r} is no commit of this repository", where=str(self.top.name), hint=hint)

    @contextmanager
    def checkout(self, commit: str) -> Iterator[Path]:
        """The files of a commit in a temporary folder, which is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="memir-diff-") as folder:
            tree = Path(folder).resolve() / "tree"
            _write(self, commit, tree, Path(folder) / "index")
            yield tree

    def changed(self, base: str, head: str) -> list[tuple[str, str]]:
        """Python files that differ, as the name in each; "" where there is none. `head` may be the working tree."""
        words = ["diff", "--no-ext-diff", "--name-status", "-M", "-z", base]
        fields = _git([*words, *([] if head == WORKING_TREE else [head]), "--"], self.top).split("\0")
        found: list[tuple[str, str]] = []
        while len(fields) > 1:
            status, first = fields.pop(0), fields.pop(0)
            if status[:1] in "RC":
                found.append((first, fields.pop(0)))
            else:
                found.append(("" if status[:1] == "A" else first, "" if status[:1] == "D" else first))
        if head == WORKING_TREE:
            others = _git(["ls-files", "--others", "--exclude-standard", "-z"], self.top).split("\0")
            found += [("", name) for name in others if name]
        return sorted({pair for pair in found if (pair[1] or pair[0]).endswith(".py")})


def _write(repository: Repository, commit: str, tree: Path, index: Path) -> None:
    tree.mkdir(parents=True, exist_ok=True)
    extra = {"GIT_INDEX_FILE": str(index), "GIT_LFS_SKIP_SMUDGE": "1"}
    words = [f"--git-dir={repository.git_dir}", f"--work-tree={tree}"]
    _git([*words, "read-tree", commit], tree, extra)
    _git([*words, "-c", "core.sparseCheckout=false", "checkout-index", "--all", "--force"], tree, extra)
    for line in _git([*words, "ls-files", "--stage", "-z"], tree, extra).split("\0"):
        mode, _, rest = line.partition(" ")
        if mode != "160000":
            continue
        name = rest.partition("\t")[2]
        inner = Repository.at(repository.top / name) if (repository.top / name).is_dir() else None
        if inner is not None and inner.top != repository.top and inner.commit(rest[:40]):
            _write(inner, rest[:40], tree / name, index.with_name(f"{index.name}-{name.replace('/', '-')}"))


def _git(words: list[str], folder: Path, extra: dict[str, str] | None = None) -> str:
    """What git prints. UsageError with its own words where it fails, or is not there."""
    private = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")  # a hook's
    env = {name: value for name, value in os.environ.items() if name not in private}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", **(extra or {})}
    try:
        done = subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError("git is not installed", hint="two files or saved programs can be compared without it") from None
    if done.returncode:
        command = next((word for word in words if not word.startswith("-")), "")
        raise UsageError(f"git {command} failed", where=done.stderr.decode(errors="replace").strip())
    return done.stdout.decode(errors="surrogateescape")
