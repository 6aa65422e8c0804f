"""`--alloc-conf` of analyze, and `--gpu` of the commands that print programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memir.cli import main

GPT = str(Path(__file__).parent.parent / "cases" / "small_gpt.py")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, [words[0], GPT, *words[1:], "-b", "2", "-s", "16"])


def test_settings_need_a_gpu() -> None:
    found = run("analyze", "--alloc-conf", "expandable_segments:True")
    assert found.exit_code == 2
    assert "add  --gpu NAME" in found.output


@pytest.mark.parametrize("text", ["max_split_size_mb:3", "expandable:True", "max_split_size_mb"])
def test_malformed_settings_are_shown(text: str) -> None:
    found = run("analyze", "--gpu", "h100", "--alloc-conf", text)
    assert found.exit_code == 2
    assert text in found.output


def test_settings_are_played_and_told() -> None:
    reserved = []
    for text in ("", "expandable_segments:True"):
        found = run("analyze", "--gpu", "h100", "--alloc-conf", text, "--format", "json")
        assert found.exit_code == 0, found.output
        told = json.loads(found.output)
        reserved.append(told["gpu"]["reserved_bytes"])
        assert (f"allocator settings: {text}" in told["assumptions"]) is bool(text)
    assert reserved[0] != reserved[1]


def test_the_kernels_are_those_of_the_gpu() -> None:
    for gpu, kernel in (("h100", "cudnn"), ("a100-sxm4-80gb", "flash")):
        assert f"_scaled_dot_product_{kernel}_attention" in run("ir", "--gpu", gpu).output
    found = run("analyze", "--gpu", "h100", "--format", "json")
    assert json.loads(found.output)["attention_kernels"] == ["cudnn"]
    assert "attention kernel cudnn" in run("analyze", "--gpu", "h100").output


def test_a_gpu_that_is_none() -> None:
    assert run("ir", "--gpu", "h1000").exit_code == 2
    assert run("ir", "--gpu", "h100", "--target", "cpu").exit_code == 2
