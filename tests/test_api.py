"""The Python API: light to import, the same answer as the command line, errors for people."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import memir
from memir.api import DEFAULT_SEQ

ROOT = Path(__file__).resolve().parent.parent
GPT = str(ROOT / "examples" / "gpt.py")
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 320, "block_size": 256}


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gpt", GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report() -> memir.Report:
    return memir.analyze(GPT, memir.Recipe(target="cpu", dtype="f32"), batch=4, seq=32, sets=SMALL)


@pytest.fixture(scope="module")
def program() -> memir.Program:
    return memir.trace(GPT, memir.Recipe(target="cpu", dtype="f32"), batch=4, seq=32, sets=SMALL).program


def test_every_public_name_is_there() -> None:
    assert sorted(memir.__all__) == sorted(set(memir.__all__))
    for name in memir.__all__:
        assert getattr(memir, name) is not None
        assert name in dir(memir)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        memir.nonsense  # noqa: B018


def test_peak_of_the_program_is_the_peak_of_the_report(report: memir.Report, program: memir.Program) -> None:
    symbolic = memir.peak(program)
    assert symbolic.evaluate({"B": 4, "S": 32})[0] == report.peak.requested
    assert memir.peak(program, B=4, S=32) == report.peak.requested
    assert memir.peak(program, B=9, S=77) == symbolic.evaluate({"B": 9, "S": 77})[0]


def test_breakdown_sums_to_the_peak(report: memir.Report) -> None:
    assert sum(nbytes for _, nbytes in report.breakdown) == report.peak.requested
    assert report.peak.requested >= report.steady.requested > 0


def test_parameters_gradients_and_states_are_counted_to_the_byte(report: memir.Report, gpt: ModuleType) -> None:
    """fp32 AdamW, zero_grad last: between steps parameters, two states each, one fp32 step each, the batch (ids, targets)."""
    model = gpt.GPT(gpt.GPTConfig(**SMALL))
    parameters = list(model.parameters())
    numel = sum(p.numel() for p in parameters)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert report.subject.num_parameters == numel
    assert report.steady.requested == 3 * 4 * numel + 4 * len(parameters) + 2 * 4 * 32 * 8 + buffers


def test_a_module_gives_what_its_file_gives_and_stays_as_it_was(report: memir.Report, gpt: ModuleType) -> None:
    model = gpt.GPT(gpt.GPTConfig(**SMALL))
    before = {name: (p.device, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    model.eval()
    again = memir.analyze(model, memir.Recipe(target="cpu", dtype="f32"), batch=4, seq=32)
    assert again.peak == report.peak
    assert again.formulas.peak == report.formulas.peak
    assert before == {name: (p.device, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    assert not model.training


def test_program_reads_back(program: memir.Program) -> None:
    assert memir.parse(memir.to_text(program)) == program


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_checkpointing_takes_less_at_large_batches_on_both_targets(target: str) -> None:
    plain, full = (
        memir.peak(
            memir.trace(GPT, memir.Recipe(target=target, checkpoint=c), batch=2, seq=64, sets=SMALL).program, B=64, S=256
        )
        for c in ("none", "full")
    )
    assert full < plain


def test_sequence_defaults_to_the_models_limit(program: memir.Program) -> None:
    report = memir.analyze(GPT, memir.Recipe(target="cpu"), batch=2, sets=SMALL)
    assert dict(report.symbols) == {"B": 2, "S": 256}
    assert DEFAULT_SEQ > 256


def test_progress_is_told_every_stage() -> None:
    stages: list[str] = []
    memir.trace(GPT, memir.Recipe(target="cpu"), batch=2, seq=16, sets=SMALL, progress=stages.append)
    assert stages[:2] == ["importing PyTorch", f"loading {GPT}"]
    assert "tracing the step" in stages


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"B": 4, "S": 32, "L": 2}, "the program has no dim L"),
        ({"B": 4, "S": 0}, "S must be a positive number, not 0"),
        ({"B": 4, "S": 257}, "valid only for S <= 256, and was given S=257"),
    ],
)
def test_points_that_make_no_sense(program: memir.Program, dims: dict[str, int], message: str) -> None:
    with pytest.raises(memir.UsageError, match=message):
        memir.peak(program, **dims)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "--batch: 0 is not a positive number"),
        ({"seq": -4}, "--seq: -4 is not a positive number"),
        ({"seq": 257, "sets": SMALL}, "GPT accepts sequences of at most 256 tokens"),
        ({"sets": {"n_layers": 3}}, "--set n_layers: GPT has no such option"),
    ],
)
def test_errors_are_usage_errors(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(memir.UsageError, match=message):
        memir.trace(GPT, **arguments)


def test_a_module_without_trainable_parameters() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)).requires_grad_(False)
    with pytest.raises(memir.UsageError, match="nothing to train"):
        memir.trace(model)


def test_torch_is_left_as_it_was(program: memir.Program) -> None:
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.empty(1).device.type == "cpu"


def test_report_is_plain_data(report: memir.Report) -> None:
    assert dataclasses.asdict(report)["symbols"] == (("B", 4), ("S", 32))
