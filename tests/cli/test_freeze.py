"""`memir freeze` as it is typed: screens, numbers, exit codes, bad input."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner, Result

from memir.cli import main

ARGUMENTS = ["tests/cases/small_gpt.py", "--set", "depth=9", "--dtype", "f32", "-b", "2", "-s", "16"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["freeze", *arguments])


def test_text_says_the_table_and_the_answers() -> None:
    result = run(*ARGUMENTS, "--gpu", "2MiB", "--cache", "disk", "--samples", "50", "--schedule", "0@0,3@0.5", "--gpus", "4")
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    assert text.splitlines()[2].split()[:3] == ["cut", "trained", "peak"]
    for word in ("fits: the smallest cut", "enough: beyond cut", "best for memory", "cache on disk", "schedule:", "k = "):
        assert word in text


def test_json_and_csv_have_the_same_numbers() -> None:
    document = json.loads(run(*ARGUMENTS, "--format", "json").stdout)
    rows = list(csv.DictReader(io.StringIO(run(*ARGUMENTS, "--format", "csv").stdout)))
    assert [c["peak"] for c in document["cuts"]] == [int(row["peak"]) for row in rows]
    assert len(rows) == 10
    assert document["layers"] == {"path": "layers", "count": 9}


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--gpu", "1KiB"), 1, ""),
        (("--schedule", "4@0.5,2@0.7"), 2, "goes back"),
        (("--samples", "3"), 2, "for a cache"),
        (("--mode", "forward"), 2, "nothing to freeze"),
        (("--gpu", "nonsense"), 2, "nonsense"),
    ],
)
def test_exit_codes(more: tuple[str, ...], code: int, message: str) -> None:
    result = run(*ARGUMENTS, *more)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
