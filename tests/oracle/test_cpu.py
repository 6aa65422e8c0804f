"""Predictions against the allocator of a real run on the CPU: a fast subset of `python -m benchmarks.accuracy_cpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.accuracy_cpu.cases import Case, all_cases
from benchmarks.accuracy_cpu.models import CONFIGS
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.accuracy_cpu.run import Figures, measured, predicted
from benchmarks.accuracy_cpu.table import TOLERANCE, read_measured, versions
from memir.runtime.measure import measure_cpu
from tests.figures import assert_same

CASES = {
    case.name: case
    for case in all_cases()
    if case.name
    in (
        "gpt2/plain",
        "gpt2/zero-first-keep-outputs",
        "llama/plain",
        "llama/checkpoint",
        "llama/bf16",
        "bloom/lora",
        "gemma3_text/foreach",
        "mixtral/plain",
        "qwen2_moe-loop/checkpoint",
        "qwen3/eager",
        "examples/llama.py/forward",
        "examples/gpt.py/plain",
    )
}


def by_hand(case: Case) -> Figures:
    """The loop as a person writes it, without anything of memir but the measuring."""

    def build() -> Callable[[], object]:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**CONFIGS[case.model])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = torch.randint(0, config.vocab_size, (case.batch, case.seq))
        labels = ids.clone()

        def step() -> None:
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

        return step

    torch.set_num_threads(1)
    found = measure_cpu(build)
    return Figures(case.name, found.at_start, found.peak, found.at_end)


@pytest.fixture(scope="module")
def truth() -> dict[str, Figures]:
    """Every case run for real, each in a fresh process."""
    return {figures.case: figures for figures in each_in_fresh_process(measured, list(CASES.values()), jobs=2)}


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_the_allocator_saw(name: str, truth: dict[str, Figures]) -> None:
    assert_same(truth[name], predicted(CASES[name]), TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_the_committed_truth_is_measured_again(name: str, truth: dict[str, Figures]) -> None:
    """Bytes do not depend on the machine, but for bf16: oneDNN's scratchpads follow the instruction set."""
    row = read_measured()[name]
    if {"torch": row.torch, "transformers": row.transformers, "peft": row.peft} != versions():
        pytest.skip("measured.csv was made with other versions of torch, transformers or peft")
    figures = truth[name]
    assert (figures.at_start, figures.at_end) == (row.at_start, row.at_end)
    if "bf16" not in name:
        assert figures.peak == row.peak


def test_the_shared_loop_takes_what_a_loop_written_by_hand_takes(truth: dict[str, Figures]) -> None:
    names = ["gpt2/plain", "llama/plain"]
    for hand in each_in_fresh_process(by_hand, [CASES[name] for name in names], jobs=1):
        shared = truth[hand.case]
        assert (hand.at_start, hand.peak, hand.at_end) == (shared.at_start, shared.peak, shared.at_end)
