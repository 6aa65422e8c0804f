"""`memir gpus`: the table, one card of it, JSON, and a word that matches nothing."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from memir.cli import main
from memir.hardware import cards


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["gpus", *arguments])


def test_the_table_has_every_card_and_fits_a_screen() -> None:
    result = run()
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split()[0] for line in lines[2:-3]] == [card.key for card in cards()]
    assert max(map(len, lines)) <= 104


def test_one_card() -> None:
    result = run("t4")
    assert " ".join(result.stdout.splitlines()[2].split()) == "t4 14.58 16 7.5 40 - 65 - - 8.1 320 - 32"


@pytest.mark.parametrize(("word", "count"), [("a100", 4), ("A100", 4), ("RTX 4090", 1), ("rtx4090", 1)])
def test_a_word_chooses(word: str, count: int) -> None:
    assert len(json.loads(run(word, "--format", "json").stdout)["gpus"]) == count


def test_json_has_bytes_and_sources() -> None:
    document = json.loads(run("h100-pcie", "--format", "json").stdout)
    (card,) = document["gpus"]
    assert document["schema_version"] == 1
    assert card["capacity_bytes"] == 81008 * 2**20
    assert card["compute_capability"] == "9.0"
    assert card["flops"]["bf16"] == 756e12
    assert card["capacity_source"]
    assert card["source"]


def test_a_word_that_matches_nothing() -> None:
    result = run("mi300x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no GPU matches 'mi300x'" in result.stderr
