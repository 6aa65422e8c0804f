"""Full fine-tuning of Mistral is ten bytes a parameter; the pure parts of its benchmark."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import memir
from benchmarks.mistral import environment, facts, rows, table, terms

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def full() -> memir.Report:
    recipe = memir.Recipe(checkpoint="full")
    return memir.analyze("mistral-7b", recipe, batch=1, seq=64, sets={"num_hidden_layers": 2})


def test_full_fine_tuning_is_ten_bytes_a_parameter(full: memir.Report) -> None:
    parameters = full.subject.num_parameters
    assert parameters is not None
    # bf16: weights, gradients, two states, and the temporary of foreach AdamW's square root
    batch, tables = 16 * 64, 1024  # ids and labels; rotary frequencies
    assert 10 * parameters <= full.peak.requested <= 10 * parameters + batch + tables
    assert (full.spot.phase, full.spot.op) == ("optimizer", "aten._foreach_sqrt")
    assert full.spot.source.startswith("torch/optim/adam.py:")
    assert 6 * parameters <= full.steady.requested <= 6 * parameters + batch + tables


def test_the_breakdown_names_the_ten_bytes(full: memir.Report) -> None:
    parameters = full.subject.num_parameters
    assert parameters is not None
    kinds = dict(full.breakdown)
    assert kinds["parameter"] == kinds["gradient"] == kinds["temporary"] == 2 * parameters
    assert kinds["optimizer_state"] == 4 * parameters
    assert kinds["activation"] == 0


@pytest.mark.parametrize(
    ("nbytes", "rest"),
    [
        (1, 0),
        (8 << 20, 0),
        (20 << 20, 0),
        (4 * 4095 * 32000 * 4, 512_000),  # of 2,097,152,000
        ((20 << 20) + 1, 0),  # nearly 2 MiB are left: worth splitting off
        ((21 << 20), 1 << 20),
        ((22 << 20) - 100, 0),  # rounded to 512 bytes it fills its block
        ((22 << 20) - 600, 512),
    ],
)
def test_what_a_block_keeps(nbytes: int, rest: int) -> None:
    assert terms.unsplit(nbytes) == rest


def test_terms() -> None:
    assert terms.cublas_workspaces().nbytes == 2 * 8_519_680
    assert terms.attention_mask(4, 4096).nbytes == 131_072
    assert terms.no_mask(4096).nbytes == -33_562_624
    assert terms.unsplit_blocks([4 * 4095 * 32000 * 4] * 2 + [5]).nbytes == 1_024_000


def test_a_row_is_judged() -> None:
    fact = facts.Fact("full", 4, peak=10_000, steady=6_000)
    good = rows.Row(rows.LOOPS[0], fact, 1000, 10_004, 6_001, "optimizer aten._foreach_sqrt", (terms.Term("x", -3),), ())
    assert (good.residue(), good.steady_residue(), good.bytes_a_parameter) == (1, 1, 10.004)
    assert list(rows.judge(good, 0.0025)) == []
    assert len(list(rows.judge(good, 0.0001))) == 1
    elsewhere = rows.Row(rows.LOOPS[0], fact, 1000, 10_004, 6_001, "backward aten.mm", (), ())
    assert "not 10.00 in the optimizer step" in next(rows.judge(elsewhere, 0.0025))


def test_constraints_are_the_tested_ones_but_for_the_pinned() -> None:
    tested = (ROOT / "constraints.txt").read_text()
    ours = environment.constraints(tested).splitlines()
    assert {f"{name}=={version}" for name, version in environment.PINNED.items()} <= set(ours)
    assert next(line for line in ours if line.startswith("torch==")) in tested
    assert not [line for line in ours if line.startswith(environment.FREE)]


def test_committed_results_are_of_these_facts() -> None:
    with (ROOT / "benchmarks/mistral/results.csv").open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == table.COLUMNS.split()
    known = {(fact.method, fact.batch): fact for fact in facts.FACTS}
    assert len(read) == sum(fact.method == loop.method for loop in rows.LOOPS for fact in facts.FACTS)
    for row in read:
        fact = known[row["method"], int(row["batch"])]
        assert (int(row["measured_peak"]), int(row["measured_steady"])) == (fact.peak, fact.steady)
        assert abs(int(row["error"])) <= 0.0025 * fact.peak
        if row["method"] == "full":
            assert f"{float(row['bytes_a_parameter']):.2f}" == "10.00"
