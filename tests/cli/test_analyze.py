"""analyze, ir and graph on a real model through the command line: output, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import memir
from memir.cli import main

ROOT = Path(__file__).resolve().parents[2]
GPT = "examples/gpt.py"
SMALL = [f"--set={k}={v}" for k, v in {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 320, "block_size": 256}.items()]
ARGUMENTS = [GPT, "-b", "4", "-s", "32", "--dtype", "f32", *SMALL]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def report() -> memir.Report:
    sets = dict(word.removeprefix("--set=").split("=") for word in SMALL)
    return memir.analyze(str(ROOT / GPT), memir.Recipe(dtype="f32"), batch=4, seq=32, sets=sets)


def test_text_is_one_screen_that_answers_first(report: memir.Report) -> None:
    result = run("analyze", *ARGUMENTS)
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert lines[0].startswith("GPT (examples/gpt.py:")
    assert "peak" in lines[2]
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in result.stdout
    assert " GB" not in result.stdout


def test_output_is_the_same_every_time_and_the_same_in_a_file(tmp_path: Path) -> None:
    first = run("analyze", *ARGUMENTS)
    second = run("analyze", *ARGUMENTS, "-o", str(tmp_path / "out.txt"))
    assert (second.exit_code, second.stdout) == (0, "")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == first.stdout


def test_json_is_the_report(report: memir.Report) -> None:
    result = run("analyze", *ARGUMENTS, "--format", "json")
    document = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert document["target"] == GPT
    assert document["peak"]["requested_bytes"] == report.peak.requested
    assert document["symbols"] == {"B": 4, "S": 32}
    assert document["recipe"]["dtype"] == "f32"
    assert set(document["versions"]) >= {"memir", "torch", "transformers"}
    assert document["inconclusive"] == []


def test_markdown_and_formula(report: memir.Report) -> None:
    markdown = run("analyze", *ARGUMENTS, "--format", "markdown")
    assert markdown.exit_code == 0
    assert "**Peak " in markdown.stdout
    formula = run("analyze", *ARGUMENTS, "--format", "formula")
    assert formula.exit_code == 0
    assert formula.stdout.splitlines()[0] == f"peak = {report.formulas.peak}"


def test_inconclusive_is_printed_and_exits_3(report: memir.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    doubtful = dataclasses.replace(report, inconclusive=("an operator without a rule",))
    monkeypatch.setattr("memir.api.analyze", lambda *_, **__: doubtful)
    result = run("analyze", *ARGUMENTS)
    assert result.exit_code == 3
    assert "inconclusive: an operator without a rule" in result.stdout


def test_ir_prints_a_program_that_reads_back_and_feeds_opt() -> None:
    result = run("ir", *ARGUMENTS)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("memir 1\nprogram @GPT\ndim B, S\n")
    program = memir.parse(result.stdout)
    assert memir.to_text(program) == result.stdout
    again = CliRunner().invoke(main, ["opt", "-"], input=result.stdout)
    assert (again.exit_code, again.stdout) == (0, result.stdout)


def test_ir_live_adds_comments_only() -> None:
    plain, live = run("ir", *ARGUMENTS), run("ir", *ARGUMENTS, "--live")
    assert live.exit_code == 0
    added = [line for line in live.stdout.splitlines() if line.strip().startswith("# after: ")]
    assert added
    assert all(" bytes" in line for line in added)
    assert memir.parse(live.stdout) == memir.parse(plain.stdout)


def test_graph_prints_operators_with_types_modules_and_lines() -> None:
    result = run("graph", *ARGUMENTS)
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line for line in lines if line.startswith("# ")] == ["# forward", "# backward", "# optimizer"]
    (gelu,) = [line for line in lines if "= aten.gelu.default(" in line and "layers.0." in line]
    assert "# f32[B, S, 256]  layers.0.mlp  examples/gpt.py:" in gelu
    assert all(line.startswith(("%", "# ")) for line in lines)


def test_graph_abbreviates_long_lists_of_foreach_operators() -> None:
    arguments = [GPT, "-b", "4", "-s", "32", "--target", "cuda", *SMALL]
    foreach = [line for line in run("graph", *arguments).stdout.splitlines() if "aten._foreach_" in line]
    assert foreach
    assert all(" in all]" in line for line in foreach)
    assert max(map(len, foreach)) < 1000


def test_a_hugging_face_model_says_nothing_on_stderr(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("analyze", str(tmp_path / "config.json"), "-b", "2", "-s", "16")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "B=2, S=16" in result.stdout.splitlines()[0]


def test_explain_shows_every_term_in_exact_bytes(report: memir.Report) -> None:
    result = run("analyze", *ARGUMENTS, "--explain")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert result.stdout == run("analyze", *ARGUMENTS, "--format", "explain").stdout
    assert f"{report.peak.requested:,} bytes" in lines[1]
    (total,) = [line for line in lines if line.startswith("  sum ")]
    assert total.split()[1] == f"{report.peak.requested:,}"
    start = next(i for i, line in enumerate(lines) if line.startswith("alive at the peak, the largest"))
    listed = [int(line.split()[0].replace(",", "")) for line in lines[start + 1 : lines.index("", start)]]
    assert sum(listed) == report.peak.requested
    assert len(listed) == len(report.top) + 1
    assert f"  between steps = {report.formulas.steady}" in lines


def test_progress_is_on_stderr_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memir.cli.progress.PATIENCE", 0.0)
    result = run("--progress", "analyze", *ARGUMENTS)
    assert result.exit_code == 0
    assert result.stdout == run("analyze", *ARGUMENTS).stdout
    assert "tracing the step ...\n" in result.stderr
    assert all(line.endswith(" ...") for line in result.stderr.splitlines())
