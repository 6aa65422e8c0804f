"""A few rows of benchmarks/distributed/results.csv run again on real ranks: the same figures."""

from __future__ import annotations

import pytest

from benchmarks.distributed import full
from benchmarks.distributed.cases import CASES, Case
from benchmarks.distributed.table import predictions, read, rows

AGAIN = ("llama.py fsdp{degree=2}", "llama-3-8b fsdp{degree=2 param-dtype=bf16 reduce-dtype=f32} clip=1.0")


@pytest.mark.parametrize("name", AGAIN)
def test_a_row_is_made_again(name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    assert rows(case) == read()[name]


DEEPSPEEDS = [case for case in CASES if "method=ulysses" in case.method]


@pytest.mark.parametrize("case", DEEPSPEEDS, ids=lambda case: case.name)
def test_deepspeeds_attention_is_predicted(case: Case) -> None:
    """DeepSpeed is not installed here: its rows are measured by `python -m benchmarks.distributed table --only ulysses`."""
    lines = read()[case.name]
    told = predictions(case, len(lines))
    assert told == [(int(line["start"]), int(line["peak"]), int(line["end"])) for line in lines]


def test_models_in_full_size_agree_with_pytorchs_own_code() -> None:
    """`python -m benchmarks.distributed full --save` runs both again, in half an hour."""
    found = full.read()
    assert {(row.preset, row.ranks) for row in found} == {("llama-3.1-8b", 8), ("llama-3.1-70b", 64), ("llama-3.1-70b", 512)}
    assert all(row.start == row.start_traced and abs(row.peak - row.peak_traced) <= 4 for row in found)  # a scalar
    assert (full.HERE / "full.md").read_text() == full.page(found)
