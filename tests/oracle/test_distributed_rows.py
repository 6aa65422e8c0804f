"""A few rows of benchmarks/distributed/results.csv run again on real ranks: the same figures."""

from __future__ import annotations

import pytest

from benchmarks.distributed.cases import CASES
from benchmarks.distributed.table import read, rows

AGAIN = ("llama.py fsdp{degree=2}", "llama-3-8b fsdp{degree=2 param-dtype=bf16 reduce-dtype=f32} clip=1.0")


@pytest.mark.parametrize("name", AGAIN)
def test_a_row_is_made_again(name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    assert rows(case) == read()[name]
