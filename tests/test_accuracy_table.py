"""The committed tables of benchmarks/accuracy_cpu: complete, consistent, and as good as is claimed."""

from __future__ import annotations

import csv

from benchmarks.accuracy_cpu.cases import all_cases
from benchmarks.accuracy_cpu.models import CONFIGS, FILES
from benchmarks.accuracy_cpu.reasons import DATA_DEPENDENT
from benchmarks.accuracy_cpu.table import RESULTS, TOLERANCE, VERDICTS, read_measured

with RESULTS.open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
FIGURES = ("start", "peak", "end")


def test_every_case_is_in_both_tables() -> None:
    names = sorted(case.name for case in all_cases())
    assert [row["case"] for row in ROWS] == names
    assert sorted(read_measured()) == names


def test_the_architectures_and_files_asked_for_are_there() -> None:
    types = {str(config["model_type"]) for config in CONFIGS.values()}
    asked = "gpt2 opt bloom gpt_neox gpt_neo codegen gpt_bigcode biogpt llama mistral qwen2 qwen3 gemma2 gemma3_text falcon"
    assert types >= {*asked.split(), "stablelm", "mixtral", "qwen2_moe", "deepseek_v3", "phi"}
    assert {"examples/gpt.py", "examples/llama.py"} <= FILES.keys()


def test_results_are_compared_with_the_committed_truth() -> None:
    truth = read_measured()
    for row in ROWS:
        real = truth[row["case"]]
        measured = [int(row[f"{figure}_measured"]) for figure in FIGURES]
        assert measured == [real.at_start, real.peak, real.at_end], row["case"]


def test_verdicts_follow_from_the_differences() -> None:
    for row in ROWS:
        worst = max(abs(int(row[f"{figure}_difference"])) for figure in FIGURES)
        verdict = VERDICTS[0] if worst == 0 else VERDICTS[1] if worst <= TOLERANCE else VERDICTS[2]
        assert row["verdict"] == verdict, row["case"]


def test_nine_of_ten_are_within_a_kibibyte_and_none_is_off_by_a_thousandth() -> None:
    close = [row for row in ROWS if row["verdict"] in VERDICTS[:2]]
    assert len(close) >= 0.9 * len(ROWS)
    assert all(row["reason"] for row in ROWS if row not in close)
    assert all(float(row["worst_percent"]) <= 0.1 for row in ROWS if row["reason"] != DATA_DEPENDENT)
