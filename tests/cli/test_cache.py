"""`memir cache`, `--no-cache`, and what the commands say when the cache cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memir import api
from memir.cache.store import Store
from memir.cli import main

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["tests/cases/small_gpt.py", "-b", "2", "-s", "16", "--mode", "forward"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_commands_share_what_was_traced(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = {name: run(name, *ARGUMENTS, "--no-cache") for name in ("analyze", "ir")}
    assert list(cached.iterdir()) == []
    assert run("analyze", *ARGUMENTS).stdout == fresh["analyze"].stdout
    monkeypatch.setattr(api, "_trace", lambda *_, **__: pytest.fail("it was traced"))
    for command, name in (("analyze", "analyze"), ("ir", "ir"), ("analyze --format ir", "ir")):
        again = run(*command.split(), *ARGUMENTS)
        assert (again.exit_code, again.stdout, again.stderr) == (0, fresh[name].stdout, "")


def test_info_and_clear(cached: Path) -> None:
    def text(programs: str, size: str) -> str:
        return f"folder    {cached}\nprograms  {programs}\nsize      {size}, at most 500.0 MiB\n"

    assert run("cache", "info").stdout == text("0 programs", "0.0 KiB")
    for name in ("1-16", "2-16"):
        Store(cached).save("key", name, "header", "x")
    nbytes = Store(cached).usage().nbytes
    size = f"{nbytes / 1024:.1f} KiB"
    assert run("cache", "info").stdout == text("2 programs of 1 target", size)
    assert json.loads(run("cache", "info", "--format", "json").stdout) == {
        "schema_version": 1,
        "folder": str(cached),
        "programs": 2,
        "targets": 1,
        "bytes": nbytes,
        "limit_bytes": 500 << 20,
    }
    result = run("cache", "clear")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"removed 2 programs of 1 target, {size}\n", "")
    assert run("cache", "clear").stdout == "removed 0 programs, 0.0 KiB\n"


def test_clear_that_is_refused_is_a_usage_error(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(cached).save("key", "1-16", "header", "x")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    result = run("cache", "clear")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: cannot clear the cache: Permission denied\n  ")


def test_trouble_is_one_line_on_stderr_and_no_failure(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cached / "file").touch()
    monkeypatch.setenv("MEMIR_CACHE_DIR", str(cached / "file"))
    result = run("analyze", *ARGUMENTS)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 0
    assert line.startswith("warning: the cache cannot be written (")
    assert result.stdout == run("analyze", *ARGUMENTS, "--no-cache").stdout


def test_no_command_that_needs_the_graph_or_a_real_step_has_the_option() -> None:
    for name in ("graph", "verify"):
        result = run(name, *ARGUMENTS, "--no-cache")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "No such option" in result.stderr
