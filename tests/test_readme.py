"""The documents are true: their Python runs, their screens are what the command prints, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from memir.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def blocks(language: str) -> list[object]:
    found = []
    for page in PAGES:
        for number, (kind, text) in enumerate(FENCED.findall(page.read_text(encoding="utf-8"))):
            if kind == language:
                found.append(pytest.param(text, id=f"{page.name}-{number}"))
    return found


@pytest.mark.parametrize("text", blocks("python"))
def test_python_in_the_documents_runs(text: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", text], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for line in text.splitlines():
        if "print(" in line and "  # " in line:
            assert line.rpartition("  # ")[2] in done.stdout.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_screens_in_the_documents_are_what_the_command_prints(page: Path, bless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `console` block is a `$ memir` line and its output; --bless writes what is printed now."""
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    now = FENCED.sub(lambda block: printed_now(block[2]) if block[1] == "console" else block[0], text)
    if bless:
        page.write_text(now, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == now, "pytest tests/test_readme.py --bless  writes what is printed now"


def printed_now(block: str) -> str:
    command = block.partition("\n")[0]
    prompt, name, *arguments = shlex.split(command)
    assert (prompt, name) == ("$", "memir")
    return f"```console\n{command}\n{CliRunner().invoke(main, arguments).stdout}```"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_documents_lead_to_files(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert broken == []


def test_examples_run() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "api.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
