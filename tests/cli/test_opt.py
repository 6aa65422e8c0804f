"""`memir opt`: passes on text, exit codes, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memir.errors import EXIT_OK, EXIT_USAGE
from memir.ir.parser import parse

STEP = """memir 1
program @p
dim B
storage $a : 8*B activation
phase f
  %a: f32[B, 2] in $a = aten.f()
  aten.g(%a) frees $a
"""
HEAVY = "torch transformers sympy numpy"


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, memir.cli\n"
        "try:\n    memir.cli.main()\n"
        f"finally:\n    print('loaded:', *sorted(set({HEAVY!r}.split()) & set(sys.modules)), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, "opt", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", check=False)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "step.memir"
    path.write_text(STEP)
    return path


def test_a_file_through_a_pipeline_without_torch(step: Path) -> None:
    done = run(str(step), "-p", "bind{B=4},unroll")
    assert done.returncode == EXIT_OK
    assert done.stdout == STEP.replace("dim B\n", "").replace("8*B", "32").replace("[B, 2]", "[4, 2]")
    assert done.stderr == "loaded:\n"


def test_stdin_other_backends_and_a_file(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    done = run("-", "--emit", "formula", "-o", str(target), text=STEP)
    assert (done.returncode, done.stdout) == (EXIT_OK, "")
    assert target.read_text().startswith("peak = 8*B\n")
    assert "torch" not in done.stderr


def test_print_after(step: Path) -> None:
    done = run(str(step), "-p", "bind{B=4},unroll", "--print-after")
    assert done.returncode == EXIT_OK
    first, second = done.stderr.removesuffix("loaded:\n").removeprefix("# after bind{B=4}\n").split("# after unroll\n")
    assert parse(first) == parse(second) == parse(done.stdout)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (STEP.replace("activation", "activaton"), (), "step.memir:4:18\n  storage $a : 8*B activaton\n                   ^\n"),
        (STEP.replace("aten.g(%a) frees $a", "aten.g(%a)"), (), "$a is never freed\n  {folder}/step.memir:4\n"),
        (
            STEP.replace("aten.g(%a)", "aten.g(%b)"),
            (),
            "uses %b, which is not defined before this operator\n  {folder}/step.memir:7\n",
        ),
        (STEP, ("-p", "bind{B=0}"), "B must be a positive number"),
        (STEP, ("-p", "bnd{B=1}"), "did you mean  bind?"),
        (STEP, ("--emit", "jsn"), "did you mean  json?"),
        (STEP, ("-o", "{folder}/no/such"), "cannot write"),
        ("", (), "the text ends without `memir 1`"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(text: str, arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path = tmp_path / "step.memir"
    path.write_text(text)
    done = run(str(path), *(a.replace("{folder}", str(tmp_path)) for a in arguments))
    assert done.returncode == EXIT_USAGE
    assert done.stdout == ""
    assert message.replace("{folder}", str(tmp_path)) in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.memir").write_bytes(b"memir 1\nprogram @p\xe4\n")
    for name, message in (("latin.memir", "not UTF-8 text\n  line 2"), ("none.memir", "No such file"), (".", "Is a directory")):
        done = run(str(tmp_path / name))
        assert done.returncode == EXIT_USAGE
        assert message in done.stderr


def test_no_verify(step: Path) -> None:
    step.write_text(STEP.replace(" frees $a", ""))
    assert run(str(step)).returncode == EXIT_USAGE
    assert run(str(step), "--no-verify").stdout == STEP.replace(" frees $a", "")
    assert run(str(step), "-p", "lifetimes").stdout == STEP
