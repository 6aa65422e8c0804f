"""`memir formula --parallel`: formulas of one rank's step over the widths of the model."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from memir.cli import main

STEP = ["formula", "llama-3-8b", "-b", "2", "-s", "64", "--symbols", "B,S,L,h,f,V"]


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [*STEP, *words])
    return result.exit_code, result.stdout, result.stderr


def test_fsdp_over_widths_equals_the_concrete_analysis() -> None:
    code, text, error = run("--parallel", "fsdp{degree=8}", "--of", "peak,states", "--check", "B=2,S=64,f=7168")
    assert code == 0, error
    assert text.count("+0") == 2


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("tensor-parallel{degree=2}", "cannot be proved where the model's widths are symbols"),
        ("tensor-parallel{degree=t}", "does not fill|in a formula over widths it is a number"),
    ],
)
def test_what_cannot_be_divided_is_inconclusive_or_an_error(passes: str, message: str) -> None:
    import re

    code, _, error = run("--parallel", passes)
    assert code in (2, 3)
    assert re.search(message, error), error
