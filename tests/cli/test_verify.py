"""verify through the command line: the screen, JSON, exit codes; the real step is replaced where only the printing matters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memir.cli import main
from memir.runtime import verify as verifying
from memir.runtime.measure import Measured
from memir.runtime.real import RealStep, measure_in_child

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt.py")
SMALL = [f"--set={k}={v}" for k, v in {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 320, "block_size": 256}.items()]
ARGUMENTS = [GPT, "-s", "32", "--target", "cpu", "--dtype", "f32", *SMALL]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="module")
def real() -> Measured:
    """The step of ARGUMENTS, run once."""
    from memir.recipe import Recipe

    sets = dict(word.removeprefix("--set=").split("=") for word in SMALL)
    return measure_in_child(RealStep(GPT, Recipe(target="cpu", dtype="f32"), 2, 32, sets))


@pytest.fixture
def seen(real: Measured, monkeypatch: pytest.MonkeyPatch) -> list[RealStep]:
    """The real steps that were asked for; each is answered with the one that was run."""
    asked: list[RealStep] = []

    def answer(step: RealStep) -> Measured:
        asked.append(step)
        return real

    monkeypatch.setattr(verifying, "measure_in_child", answer)
    return asked


def test_an_exact_prediction_exits_0(seen: list[RealStep]) -> None:
    result = run("verify", *ARGUMENTS)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].endswith("B=2 S=32   on cpu")
    assert [line.split()[0] for line in lines[2:6]] == ["bytes", "start", "peak", "end"]
    assert "+0" in lines[3]
    assert len(lines) <= 30
    assert [(step.batch, step.seq, step.device) for step in seen] == [(2, 32, "cpu")]


def test_json_has_the_figures_and_the_timelines(seen: list[RealStep], real: Measured) -> None:
    document = json.loads(run("verify", *ARGUMENTS, "--format", "json").stdout)
    assert document["agrees"] is True
    assert document["figures"]["peak"]["measured_bytes"] == real.peak
    assert document["figures"]["peak"]["error_bytes"] == document["figures"]["peak"]["predicted_bytes"] - real.peak
    assert document["timelines"]["num_matched"] > 100
    assert document["peak"]["measured_at"].startswith("aten::")


def test_beyond_the_tolerance_exits_1(real: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "measure_in_child", lambda step: replace(real, at_end=real.at_end + 2000))
    result = run("verify", *ARGUMENTS)
    assert result.exit_code == 1
    assert "differs by up to 2,000 bytes" in result.stdout
    assert run("verify", *ARGUMENTS, "--tolerance", "2000").exit_code == 0


def test_without_a_gpu_and_without_a_target_it_runs_on_the_cpu(seen: list[RealStep], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = [word for word in ARGUMENTS if word not in ("--target", "cpu")]
    assert run("verify", *words).exit_code == 0
    assert seen[0].device == "cpu"
    asked_for = run("verify", *words, "--target", "cuda")
    assert asked_for.exit_code == 3
    assert "--target cpu" in asked_for.stderr


def test_a_step_larger_than_the_machine_is_not_started(seen: list[RealStep]) -> None:
    result = run("verify", "llama-3.1-405b", "--target", "cpu", "--set", "num_hidden_layers=2", "-b", "4096", "-s", "8192")
    assert result.exit_code == 2
    assert "GiB of memory here" in result.stderr
    assert seen == []


def test_what_the_real_step_raises_is_shown(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    text = Path(GPT).read_text(encoding="utf-8")
    broken = text.replace("import torch\n", "import os\n\nimport torch\n", 1).replace(
        "class Attention",
        'if "memir.runtime.child" in " ".join(__import__("sys").orig_argv):\n    os._exit(7)\n\n\nclass Attention',
        1,
    )
    model.write_text(broken, encoding="utf-8")
    result = run("verify", str(model), *ARGUMENTS[1:])
    assert result.exit_code == 3
    assert "exit code 7" in result.stderr
