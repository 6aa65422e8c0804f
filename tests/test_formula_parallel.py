"""`memir formula --parallel`: formulas of one rank's step over the widths of the model."""

from __future__ import annotations

from click.testing import CliRunner

from memir.cli import main

STEP = ["formula", "llama-3-8b", "-b", "2", "-s", "64"]


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [*STEP, *words])
    return result.exit_code, result.stdout, result.stderr


def test_fsdp_over_widths_equals_the_concrete_analysis() -> None:
    code, text, error = run("--parallel", "fsdp{degree=8}", "--of", "peak,states", "--check", "B=2,S=64,f=7168")
    assert code == 0, error
    assert text.count("+0") == 2


def test_a_hidden_size_without_the_heads() -> None:
    """The heads are a number then, and the head size is no h/a."""
    code, text, error = run("--symbols", "B,S,L,h,f,V", "--of", "peak", "--check", "B=2,S=64,h=2048")
    assert code == 0, error
    assert text.count("+0") == 1


def test_a_degree_is_a_number() -> None:
    code, _, error = run("--parallel", "tensor-parallel{degree=t}", "--symbols", "B,S,L,f")
    assert code == 2
    assert "in a formula over widths it is a number" in error
