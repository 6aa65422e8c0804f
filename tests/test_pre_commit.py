"""The hook, through the real pre-commit, in a temporary repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_diff_revisions import commit, git

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """\
repos:
  - repo: {hooks}
    rev: {rev}
    hooks:
      - id: memir-check
"""
BUDGET = '[scenarios.step]\ntarget = "model.py"\nbatch = 4\nseq = 64\nmax = "{max}"\n'


def test_the_hook_holds_a_push_back(tmp_path: Path) -> None:
    hooks, project, tools = tmp_path / "hooks", tmp_path / "a project", tmp_path / "bin"
    for folder in (hooks, project, tools):
        folder.mkdir()
    git(hooks, "init", "-q", "-b", "main")
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    rev = commit(hooks, "hooks", {})
    git(project, "init", "-q", "-b", "main")
    shutil.copy(ROOT / "tests/regressions/head_tied/after.py", project / "model.py")
    files = {".pre-commit-config.yaml": CONFIG.format(hooks=hooks.as_posix(), rev=rev), "memir.toml": BUDGET.format(max="1KiB")}
    commit(project, "first", files)
    cache = tmp_path / "cache"
    (tools / "memir").write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{ROOT}" MEMIR_CACHE_DIR="{cache}"\nexec "{sys.executable}" -m memir "$@"\n'
    )
    (tools / "memir").chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PRE_COMMIT_HOME": str(tmp_path / "pre-commit")}
    env.pop("MEMIR_NO_CACHE", None)

    def push() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "pre_commit", "run", "--hook-stage", "pre-push", "--all-files"]
        return subprocess.run(words, cwd=project, env=env, capture_output=True, text=True, check=False)

    held = push()
    assert held.returncode == 1
    assert "budget-exceeded" in held.stdout, held.stdout
    commit(project, "more memory", {"memir.toml": BUDGET.format(max="1GiB")})
    assert push().returncode == 0
    plain = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    commit_stage = subprocess.run(plain, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert "memir" not in commit_stage.stdout  # it runs before a push, not at every commit


def test_the_manifest_is_valid() -> None:
    words = [sys.executable, "-m", "pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml")]
    assert subprocess.run(words, check=False).returncode == 0
