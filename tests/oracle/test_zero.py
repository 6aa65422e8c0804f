"""The zero pass against real DeepSpeed: the committed measurements of two CPU ranks (benchmarks/distributed/zero.csv).

DeepSpeed itself is not installed here; `python -m benchmarks.distributed zero` measures again.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

from benchmarks.distributed.zero import HERE, Row, predicted, read, traced
from benchmarks.distributed.zero_cases import CASES
from benchmarks.published_formulas import zero as formulas
from memir.ir.core import Program

RESIDENT = 16  # bytes of scalars: overflow tracker, loss scale, norm
PEAK = 128  # and numbers that operators make tensors of


@lru_cache(maxsize=2)
def step(key: str) -> Program:
    return traced(next(c for c in CASES if f"{c.target} {c.sets} {c.recipe}" == key))


@pytest.mark.parametrize("row", read(), ids=lambda row: f"{row.case}-{row.rank}")
def test_bytes_are_deepspeeds(row: Row) -> None:
    case = next(c for c in CASES if c.name == row.case)
    start, peak = predicted(case, row.rank, step(f"{case.target} {case.sets} {case.recipe}"))
    assert 0 <= row.start - start <= RESIDENT
    assert 0 <= row.peak - peak <= PEAK


def test_every_case_is_in_the_table() -> None:
    assert [c.name for c in CASES] == list(dict.fromkeys(row.case for row in read()))
    page = (HERE / "zero.md").read_text()
    assert all(f"| {c.name} | 0 |" in page for c in CASES)


def test_model_states_are_the_papers() -> None:
    found = list(formulas.rows())
    assert len(found) == 15
    assert all(row.is_accounted_for for row in found)
    assert (formulas.HERE / "zero.md").read_text() == formulas.page(found)
