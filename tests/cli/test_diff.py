"""memir diff on the command line: saved programs in every format, files, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memir.cli import main
from tests.programs import STEP
from tests.sarif import results

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ROOT / "tests" / "regressions"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["diff", *arguments])


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two saved programs: the second one's logits are twice as large, and its activations have a term in S*S."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.memir").write_text(STEP)
    wide = STEP.replace("$logits : 400*B*S", "$logits : 800*B*S").replace("$h : 64*B*S ", "$h : 64*B*S + 2*B*S^2 ")
    (tmp_path / "b.memir").write_text(wide)
    return tmp_path


AT = ("a.memir", "b.memir", "-b", "4", "-s", "64")
TEXT = """\
a.memir -> b.memir   B=4, S=64

  peak    0.22 MiB -> 0.34 MiB   +0.13 MiB (+59.7 %)   +135,168 bytes
  place   backward at aten._log_softmax_backward_data (model.py:31), as before
  formula at this point  +2*B*S**2 + 400*B*S
  the peak gained a B*S**2 term: 2*B*S**2 bytes, 0.03 MiB here

  changed at the peak                               MiB  count
  grew          saved for backward                +0.10      1  head  aten.mm  model.py:30
  grew          saved for backward                +0.03      1  layers.*.up  aten.mm  model.py:20

  peak before = Max(8*B*S + 34000, 872*B*S + 3000)
  peak after = Max(8*B*S + 34000, 2*B*S**2 + 1272*B*S + 3000)
"""


def test_text(saved: Path) -> None:
    result = run(*AT)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == TEXT


def test_json(saved: Path) -> None:
    data = json.loads(run(*AT, "--format", "json").stdout)
    assert (data["delta_bytes"], data["delta_formula"], data["peak_moved"]) == (135_168, "2*B*S**2 + 400*B*S", False)
    assert [change["what"] for change in data["changes"]] == ["grew", "grew"]
    assert data["after_bytes"] - data["before_bytes"] == sum(c["after_bytes"] - c["before_bytes"] for c in data["changes"])
    assert data["orders"][0]["order"] == "B*S**2"


def test_markdown(saved: Path) -> None:
    text = run(*AT, "--format", "markdown").stdout
    assert "| peak, B=4, S=64 | 0.22 MiB | 0.34 MiB | +0.13 MiB | +59.7 % |" in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert "**The peak gained a `B*S**2` term**: `2*B*S**2` bytes" in text


def test_github_and_sarif_name_the_line(saved: Path) -> None:
    lines = run(*AT, "--format", "github").stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::warning", "::warning"]
    assert all("file=model.py,line=31" in line for line in lines)
    found = results(run(*AT, "--format", "sarif").stdout)
    assert {result["ruleId"] for result in found} == {"MEM002", "MEM003"}


def test_output_is_the_same_every_time_and_in_a_file(saved: Path) -> None:
    first = run(*AT).stdout
    assert run(*AT, "-o", "out.txt").stdout == ""
    assert (saved / "out.txt").read_text(encoding="utf-8") == first == run(*AT).stdout


def test_two_files_with_the_line_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("before", "after"):
        shutil.copy(PAIRS / "logits_kept_on_module" / f"{name}.py", tmp_path)
    result = run("before.py", "after.py", "-b", "4", "-s", "64", "--dtype", "f32", "--target", "cpu", "--format", "json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["delta_bytes"] == 4 * 64 * 512 * 4
    assert data["lines"][0]["text"] == "self.last_logits = logits"
    assert data["lines"][0]["file"] == "after.py"
    assert [c["what"] for c in data["changes"]] == ["lives longer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.memir", "b.memir", "-b", "4"), "a.memir: no value is given for S"),
        (("a.memir", "b.memir", "-b", "4", "-s", "2048"), "the program is valid only for S <= 1024"),
        (("a.memir", "none.memir", "-b", "4", "-s", "64"), "none.memir cannot be read"),
        (("a.memir", "b.memir", "--dim", "L"), "--dim: 'L' is not NAME=N"),
        (("a", "b", "model.py"), "this folder is in no git repository"),
    ],
)
def test_what_it_refuses(saved: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}")
