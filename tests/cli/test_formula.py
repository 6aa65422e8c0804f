"""`memir formula` on the command line: a formula beside a fresh analysis, and options that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from memir.cli import main

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt.py")
SMALL = ["--set", "n_layer=6", "--set", "n_embd=128", "--set", "n_head=4", "--set", "vocab_size=1000"]


def test_the_formula_at_other_widths_is_the_analysis_of_that_model() -> None:
    point = "B=3,S=100,L=7,h=160,V=900,a=5,P=555"
    done = CliRunner().invoke(main, ["formula", GPT, *SMALL, "--of", "peak,layer,states", "--check", point])
    assert (done.exit_code, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ") and line.split()[0] != "formula"]
    assert [row[0] for row in rows] == ["peak", "layer", "states"]
    assert all(row[1] == row[2] and row[3] == "+0" for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--standalone"], "--standalone is a document for LaTeX"),
        (["--solve", "B"], "--solve needs the memory that has to suffice"),
        (["--gpu", "80GiB"], "--gpu is what --solve fits the step into"),
        (["--check", "B"], "--check: 'B' is not SYMBOL=NUMBER"),
        (["--units", "elements", "--check", "B=2"], "--check is in bytes"),
        (["--check", "B=2", "--solve", "S", "--gpu", "1GiB"], "--check and --solve"),
        (["other.py", "--check", "B=2"], "OTHER"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["formula", GPT, *words])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in done.stderr
