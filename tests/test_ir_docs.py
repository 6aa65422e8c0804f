"""docs/ir.md says what is so: its programs are in canonical form and verify, its lists are the tables'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memir.ir.core import Kind
from memir.ir.dtypes import ITEMSIZE
from memir.ir.printer import to_text
from memir.ir.source import read_program
from memir.ir.unroll import unroll
from memir.ir.verify import verify
from memir.registry import BACKENDS, PASSES
from tests.golden.test_golden import check

TEXT = (Path(__file__).parent.parent / "docs" / "ir.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_example_is_canonical_and_verifies() -> None:
    (example,) = [block for block in BLOCKS if block.startswith("memir 1")]
    program = read_program(example)
    assert to_text(program) == example
    verify(unroll(program, {"L": 2}))


def test_the_golden_test_passes(tmp_path: Path) -> None:
    (case,) = [block for block in BLOCKS if block.startswith("# run:")]
    path = tmp_path / "case.memir"
    path.write_text(case)
    check(path, tmp_path)


@pytest.mark.parametrize(
    ("pattern", "known"),
    [
        (r"KIND is one of\n`([^`]*)`", [k.value for k in Kind]),
        (r"Types are\n`([^`]*)`", list(ITEMSIZE)),
        (r"^Passes: (.*?)\. Backends", [f"`{name}`" for name in PASSES]),
        (r"Backends: (.*?)\. A package", [f"`{name}`" for name in BACKENDS]),
    ],
)
def test_lists_are_complete(pattern: str, known: list[str]) -> None:
    found = re.search(pattern, TEXT, re.MULTILINE)
    assert found
    assert sorted(re.split(r"[,\s]+", found[1])) == sorted(known)
