"""benchmarks/distributed/results.csv: complete, its verdicts follow from its figures, and they meet the aim."""

from __future__ import annotations

import pytest

from benchmarks.distributed.cases import CASES
from benchmarks.distributed.table import Row, judged, read
from memir.frontend.parallel import parse_methods
from memir.frontend.parallel.method import world_size
from memir.runtime.measure import Measured

TABLE = read()
LINES = [line for lines in TABLE.values() for line in lines]
PREDICTED = [line for line in LINES if line["peak_error"]]


def test_the_table_has_only_known_cases_and_all_of_their_ranks() -> None:
    known = {case.name: case for case in CASES}
    assert TABLE.keys() <= known.keys()
    for name, lines in TABLE.items():
        assert [line["rank"] for line in lines] == [str(r) for r in range(world_size(parse_methods(known[name].method)))]


@pytest.mark.parametrize("line", PREDICTED, ids=[f"{line['case']} {line['rank']}" for line in PREDICTED])
def test_a_verdict_follows_from_the_figures(line: Row) -> None:
    start, peak, end = (int(line[name]) for name in ("start", "peak", "end"))
    told = tuple(int(line[name]) + int(line[f"{name}_error"]) for name in ("start", "peak", "end"))
    assert judged(Measured("cpu", start, peak, end, peak), told)["verdict"] == line["verdict"]  # type: ignore[arg-type]


def test_nine_ranks_in_ten_are_within_a_thousandth_and_none_beyond_a_hundredth() -> None:
    shares = [abs(int(line["peak_error"])) / int(line["peak"]) for line in PREDICTED]
    assert PREDICTED
    assert max(shares) <= 0.01
    assert sum(share <= 0.001 for share in shares) >= 0.9 * len(shares)


def test_the_trace_of_pytorchs_own_code_is_exact() -> None:
    errors = [int(line["trace_error"]) for line in LINES if line["trace_error"]]
    assert errors
    assert max(map(abs, errors)) <= 256
