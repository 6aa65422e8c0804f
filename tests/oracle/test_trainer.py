"""`--loop trainer` against Hugging Face's own Trainer, with accelerate, run on the CPU: figures of its third step."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import AbstractContextManager
from difflib import SequenceMatcher
from typing import Any

import pytest
import torch

import memir
from benchmarks.accuracy_cpu.cases import Case
from benchmarks.accuracy_cpu.models import CONFIGS
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.accuracy_cpu.run import Figures, target_of
from memir.analysis.liveness import flatten, timeline
from memir.ir.core import Program
from memir.recipe import Recipe

STEPS = 3
RECIPE = Recipe(target="cpu", dtype="f32", loop="trainer")
CASES = {
    one.name: one
    for one in (
        Case("llama", "trainer", RECIPE, 2, 128),
        Case("llama", "trainer-amp", dataclasses.replace(RECIPE, amp="bf16"), 2, 128),
        Case("gpt2", "trainer-amp-accumulate", dataclasses.replace(RECIPE, amp="bf16", accumulate=4), 2, 128),
    )
}
TOLERANCE = 1024  # bytes: Python numbers that autograd keeps
LARGE = 1024  # bytes
Truth = dict[str, tuple[Figures, list[tuple[int, str]]]]
WORKSPACES = (
    "flash_attention",
    "native_layer_norm_backward",
    "aten::sum >",
)  # kernels' own: memir.ir.opset counts them as scratch


class Fixed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of `seq` tokens, no padding."""

    def __init__(self, vocab: int, rows: int, seq: int) -> None:
        self.tokens = torch.randint(0, vocab, (rows, seq))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self.tokens[index].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def run(case: Case) -> tuple[Figures, list[tuple[int, str]]]:
    """Trainer as a person calls it: the profiler's events of the third step, cut as memir's own runs are."""
    from torch.profiler import ProfilerActivity, profile, record_function
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from memir.runtime.measure import _MARK, RawEvent, _walk, cut_step

    class Mark(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.open: AbstractContextManager[Any] | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == STEPS - 1:
                self.open = record_function(_MARK)
                self.open.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.open is not None:
                self.open.__exit__(None, None, None)
                self.open = None

    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe = case.recipe
    config = AutoConfig.for_model(**CONFIGS[case.model])
    rows = Fixed(config.vocab_size, case.batch * recipe.accumulate * (STEPS + 1), case.seq)
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof,
    ):
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=case.batch,
            gradient_accumulation_steps=recipe.accumulate,
            bf16=recipe.amp == "bf16",
            max_steps=STEPS,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        Trainer(model, arguments, train_dataset=rows, callbacks=[Mark()]).train()
    raw, start, end = [], 0, 0
    for event, ops, calls in _walk(prof.profiler.kineto_results.experimental_event_tree()):
        if event.name == _MARK:
            start, end = event.start_time_ns, event.end_time_ns
        elif event.name == "[memory]":
            fields = event.extra_fields
            raw.append(RawEvent(event.start_time_ns, fields.alloc_size, fields.total_allocated, fields.ptr, ops, calls))
    found = cut_step(raw, start, end)
    large = [(event.delta, " > ".join(event.ops)) for event in found.timeline if event.delta >= LARGE]
    return Figures(case.name, found.at_start, found.peak, found.at_end), large


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Every case run for real, each in a fresh process: its figures, and its large allocations in order."""
    return {found[0].case: found for found in each_in_fresh_process(run, list(CASES.values()), jobs=2)}


def traced(case: Case) -> Program:
    with target_of(case) as (target, sets):
        return memir.trace(target, case.recipe, batch=case.batch, seq=case.seq, sets=sets).program


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_the_allocator_saw(name: str, truth: Truth) -> None:
    """On the CPU the batch that accelerate's loader has fetched ahead lies in the same memory (`DataLoaderShard.__iter__`)."""
    case, (real, events) = CASES[name], truth[name]
    program, env = traced(case), {"B": case.batch, "S": case.seq}
    told = timeline(program).evaluate(env)
    ahead = 3 * 8 * case.batch * case.seq
    assert abs(told.start + ahead - real.at_start) <= TOLERANCE
    assert abs(told.peak + ahead - real.peak) <= TOLERANCE
    assert abs(told.after[-1] + ahead - real.at_end) <= TOLERANCE
    if name == "llama/trainer":  # under autocast oneDNN's scratchpads lie between
        ours = allocations(program, env)
        changes = SequenceMatcher(None, ours, [size for size, _ in events], autojunk=False).get_opcodes()
        assert [ours[i:j] for tag, i, j, _, _ in changes if tag in ("delete", "replace")] == []
        missing = [event for tag, _, _, k, m in changes if tag in ("insert", "replace") for event in events[k:m]]
        assert [event for event in missing if not any(word in event[1] for word in WORKSPACES)] == []


def test_outputs_are_copied_to_fp32_as_accelerate_does_it(truth: Truth) -> None:
    """Tensors of the logits' size: in fp32 the loss's copy, its log_softmax, accelerate's copy, two gradients."""
    case = CASES["llama/trainer-amp"]
    size = 4 * case.batch * case.seq * int(CONFIGS["llama"]["vocab_size"])  # type: ignore[call-overload]
    real = [nbytes for nbytes, _ in truth[case.name][1] if nbytes in (size, size // 2)]
    assert real == [size // 2, *[size] * 5, size // 2]
    assert [n for n in allocations(traced(case), {"B": case.batch, "S": case.seq}) if n in (size, size // 2)] == real


def allocations(program: Program, env: dict[str, int]) -> list[int]:
    """Sizes of the program's large allocations in order."""
    nbytes = {s.name: s.nbytes.evaluate(env) for s in program.storages}
    live = {s.name for s in program.storages if s.live_in}
    made = []
    for op in flatten(program).counted({}):
        for value in op[0].results:
            if value.storage not in live:
                live.add(value.storage)
                made.append(nbytes[value.storage])
        live -= set(op[0].frees)
    return [size for size in made if size >= LARGE]
