"""`memir plan` as it is typed: the screen, JSON, configurations, exit codes, bad input."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from memir.cli import main

ARGUMENTS = ["tests/cases/small_gpt.py", "--set", "depth=9", "-s", "64", "--gpu", "a100-80gb", "--global-batch", "8"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_text_answers_first_and_fits_a_screen() -> None:
    result = run(*ARGUMENTS, "--gpus", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert lines[2].startswith("best: one gpu, micro-batch 8")
    for word in ("because: ", "tokens/s predicted", "candidates evaluated", "again: memir analyze"):
        assert word in result.stdout
    assert result.stdout == run(*ARGUMENTS, "--gpus", "1").stdout


def test_json_has_it_all() -> None:
    document = json.loads(run(*ARGUMENTS, "--gpus", "1", "--format", "json").stdout)
    winner = document["winner"]
    assert winner == document["rows"][0]
    assert winner["fits"]
    assert winner["peak"] <= document["capacity"]
    assert winner["micro_batch"] * winner["accumulate"] * winner["degrees"]["copies"] == document["global_batch"] == 8
    assert winner["seconds"]["step"] == pytest.approx(8 * 64 / winner["tokens_per_second"], rel=0.01)
    assert document["candidates"] >= document["evaluated"] >= 1


def test_a_configuration_instead() -> None:
    result = run(*ARGUMENTS, "--gpus", "1", "--emit", "torchtitan")
    assert result.exit_code == 0
    assert "local_batch_size = 8" in result.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gpus", "1", "--gpu", "80GiB"], "an amount of memory has no speed"),
        (["--gpus", "3", "--nodes", "2"], "do not stand"),
        (["--gpus", "1", "-b", "2"], "finds the micro-batch"),
        (["--gpus", "1", "--mode", "forward"], "trains nothing"),
        (["--gpus", "1", "--tune", "freeze"], "belong together"),
        (["--gpus", "1", "--cut", "2"], "belong together"),
        (["--gpus", "1", "--checkpoints", "some"], "no way of checkpointing"),
        (["--gpus", "1", "--checkpoints", ""], "none is given"),
        (["--gpus", "1", "--methods", "magic"], "no method"),
        (["--gpus", "1", "--inter-node", "ib"], "no network"),
        (["--gpus", "1", "--intra-node", "ib-400"], "no link"),
    ],
)
def test_bad_input_says_what_to_do(more: list[str], message: str) -> None:
    result = run(*ARGUMENTS, *more)
    assert result.exit_code == 2
    assert message in result.stderr


def test_several_gpus_are_what_the_passes_say() -> None:
    """The rows' peaks are those of `memir analyze --parallel` with the row's passes."""
    arguments = [*ARGUMENTS, "--gpus", "2", "--methods", "ddp,fsdp", "--checkpoints", "none,full"]
    document = json.loads(run(*arguments, "--format", "json").stdout)
    assert {row["kind"] for row in document["rows"]} == {"ddp", "fsdp"}
    assert document["not_described"] == []
    for row in document["rows"]:
        step = ["-b", str(row["micro_batch"]), "-s", "64", "--accumulate", str(row["accumulate"]), "--gpu", "a100-80gb"]
        more = ["--parallel", row["passes"], "--format", "json"]
        result = CliRunner().invoke(main, ["analyze", *ARGUMENTS[:3], *step, *more])
        assert json.loads(result.stdout)["peak"]["requested_bytes"] == row["peak"]


def test_pipelines_are_described_and_what_a_pass_refuses_is_told() -> None:
    more = ["--gpus", "2", "--methods", "pp,tp-sp", "--checkpoints", "none"]
    document = json.loads(run(*ARGUMENTS, *more, "--format", "json").stdout)
    described = {row["kind"] for row in document["rows"]}
    assert "pp" in described
    assert described | {failure["kind"] for failure in document["not_described"]} == {"tp-sp", "pp"}
    assert all(failure["reason"] for failure in document["not_described"])
    for row in document["rows"]:
        assert row["fits"]
        assert row["seconds"]["communicating"] > 0
        assert (row["seconds"]["bubble"] > 0) == (row["degrees"]["pipeline"] > 1)


def test_pytorch_s_own_code_beside_the_winner() -> None:
    more = ["--gpus", "2", "--checkpoints", "full", "--exact", "--format", "json"]
    document = json.loads(run(*ARGUMENTS, *more, "--methods", "fsdp").stdout)
    assert document["exact_peak"] == document["winner"]["peak"]
    document = json.loads(run(*ARGUMENTS, *more, "--methods", "ddp").stdout)
    assert document["exact_peak"] is None
    assert "cannot be traced" in document["exact_reason"]


def test_small_models_are_in_mib_and_nothing_described_is_no_answer() -> None:
    result = run(*ARGUMENTS, "--gpus", "1", "--checkpoints", "none")
    assert "peak MiB" in result.stdout
    assert " 0.0" not in result.stdout
    result = run(*ARGUMENTS, "--gpus", "2", "--methods", "tp-sp", "--checkpoints", "none")
    assert result.exit_code == 3
    assert "no answer: no method's program can be made" in result.stdout
    assert "nothing fits" not in result.stdout


def test_nothing_fits() -> None:
    result = run(*ARGUMENTS, "--gpus", "1", "--set", "width=65536", "--checkpoints", "full")
    assert result.exit_code == 1
    assert "nothing fits" in result.stdout
    assert "nearest: one gpu" in result.stdout
