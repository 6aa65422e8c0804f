"""`memir sweep` on a real model: the same numbers as single analyses, recipes, exit codes, bad input."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import memir
from memir.cli import main
from memir.cli.options import Request
from memir.sweep.pool import Step, Trace
from tests.programs import step

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 320, "block_size": 256}
ARGUMENTS = ["examples/gpt.py", "--dtype", "f32", *(f"--set={k}={v}" for k, v in SIZES.items())]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *arguments])


def rows(*arguments: str, code: int = 0) -> list[dict[str, str]]:
    result = run(*ARGUMENTS, *arguments, "--format", "csv")
    assert (result.exit_code, result.stderr) == (code, "")
    return list(csv.DictReader(io.StringIO(result.stdout)))


@pytest.fixture(scope="module", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sweeps of one recipe trace it once; what they are compared with is traced anew (`single`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MEMIR_NO_CACHE")
        patch.setenv("MEMIR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def single(batch: int, seq: int, **options: str) -> memir.Report:
    recipe = replace(memir.Recipe(dtype="f32"), **options)
    return memir.analyze("examples/gpt.py", recipe, batch=batch, seq=seq, sets=SIZES, cache=False)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_sweep_has_the_numbers_of_single_analyses() -> None:
    """At B=1, at the model's limit, and between."""
    found = {(int(row["B"]), int(row["S"])): row for row in rows("-b", "1,2,8", "-s", "32:256:32")}
    assert list(found) == [(batch, seq) for batch in (1, 2, 8) for seq in range(32, 257, 32)]
    for batch, seq in ((1, 256), (2, 96), (8, 256)):
        report = single(batch, seq)
        row = found[batch, seq]
        assert int(row["requested_bytes"]) == report.peak.requested
        assert int(row["allocated_bytes"]) == report.peak.allocated
        assert int(row["steady_requested_bytes"]) == report.steady.requested
        assert int(row["steady_allocated_bytes"]) == report.steady.allocated
        assert (row["phase"], row["op"], row["module"], row["source"]) == (
            report.spot.phase,
            report.spot.op,
            report.spot.module,
            report.spot.source,
        )


def test_a_list_of_targets_is_two_recipes() -> None:
    found = rows("-b", "2,4", "-s", "64", "--target", "cpu,cuda", "--optimizer", "sgd")
    assert [(row["target"], row["B"]) for row in found] == [("cpu", "2"), ("cpu", "4"), ("cuda", "2"), ("cuda", "4")]
    report = single(4, 64, target="cpu", optimizer="sgd")
    assert int(found[1]["requested_bytes"]) == int(found[1]["allocated_bytes"]) == report.peak.requested


def test_every_combination_of_lists_is_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def tracer(request: Request, stage: object) -> Trace:
        asked.append(request)
        return lambda batch, seq: Step(step(), seq=64)

    monkeypatch.setattr("memir.cli.sweep._tracer", tracer)
    lists = ["--checkpoint", "none,full", "--accumulate", "1,4", "--dropout", "on,off"]
    adapters = ["--lora", "none", "--lora", "r=4,targets=qkv,up"]
    found = rows(*lists, *adapters, "--keep-outputs", "--no-cache", "--clip", "1.5", "--trust-remote-code")
    names = ("accumulate", "checkpoint", "lora", "dropout")
    assert [tuple(row[name] for name in names) for row in found] == [
        (accumulate, checkpoint, lora, dropout)
        for accumulate in ("1", "4")
        for checkpoint in ("none", "full")
        for lora in ("", "r=4,alpha=32,targets=qkv,up")
        for dropout in ("true", "false")
    ]
    assert {(row["dtype"], row["keep_outputs"], row["clip"]) for row in found} == {("f32", "true", "1.5")}
    assert {(request.cache, request.trust_remote_code) for request in asked} == {(False, True)}
    assert asked[0].sets == {name: str(value) for name, value in SIZES.items()}


def test_beyond_the_limit_is_a_reason_and_exit_code_3() -> None:
    found = rows("-b", "2", "-s", "128,256,512", code=3)
    assert [row["proven"] for row in found] == ["true", "true", "false"]
    assert (found[2]["requested_bytes"], found[2]["reason"]) == ("", "GPT accepts sequences of at most 256 tokens")


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    """24 MiB: the answer is that of an analysis, and exit code 0."""
    (found,) = rows("--max-batch", "--gpu", "24MiB", "-s", "128")
    sizes = [int(found[name]) for name in ("largest_B", "next_B")]
    assert sizes[1] == sizes[0] + 1
    peaks = [single(batch, 128).peak.allocated for batch in sizes]
    assert peaks[0] <= 24 * 2**20 < peaks[1]
    assert peaks == [int(found["allocated_bytes"]), int(found["next_allocated_bytes"])]


def test_the_longest_sequence_ends_at_the_models_limit() -> None:
    found = rows("--max-seq", "--gpu", "1GiB", "-b", "1,3")
    assert [(row["B"], row["largest_S"], row["limit"]) for row in found] == [
        (batch, "256", "GPT accepts sequences of at most 256 tokens") for batch in ("1", "3")
    ]


def test_nothing_fits_is_exit_code_1() -> None:
    assert rows("--max-batch", "--gpu", "1MiB", "-s", "128", code=1)[0]["largest_B"] == ""
    assert rows("-b", "2", "-s", "64,128", "--gpu", "1MiB", code=1)[0]["fits"] == "false"


def test_json_and_text_name_the_target(tmp_path: Path) -> None:
    document = json.loads(run(*ARGUMENTS, "-b", "2", "-s", "64", "--format", "json").stdout)
    assert document["target"] == "examples/gpt.py"
    assert set(document["versions"]) >= {"memir", "torch", "transformers"}
    result = run(*ARGUMENTS, "-b", "2,4", "-s", "64,128", "-o", str(tmp_path / "out.txt"))
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").startswith("GPT   MiB at the peak   cuda, f32, adamw\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-b", "0"], "error: --batch: 0 is not a positive number"),
        (["-b", "1,,2"], "error: --batch: '1,,2' has an empty place"),
        (["-s", "512:256:2"], "error: --seq: the range 512:256:2 ends below its start"),
        (["-s", "1:2:3:4"], "error: --seq: '1:2:3:4' is neither a number nor a range first:last:step"),
        (["-s", "a"], "error: --seq: 'a' is neither a number nor a range"),
        (["-s", "1:9:0"], "error: --seq: 0 is not a positive number"),
        (["-b", "1:100000000"], "error: --batch: 1:100000000 gives more than 1,000,000 values"),
        (["--optimizer", "sgd,sgd"], "error: --optimizer: sgd is given twice"),
        (["--checkpoint", "none,half"], "'half' is not one of 'none', 'full'"),
        (["--accumulate", "1,x"], "'x' is not a valid integer"),
        (["--lora", "r=x"], "error: --lora: not a number"),
        (["--gpu", "80GB"], "error: --gpu: '80GB' is 10^9 or 2^30 bytes each\n  write  --gpu 80GiB"),
        (["--max-batch"], "error: --max-batch needs the memory that has to suffice\n  write  --max-batch --gpu 80GiB"),
        (["--max-batch", "--max-seq", "--gpu", "80GiB"], "error: --max-batch and --max-seq: one of the two"),
        (["--max-batch", "-b", "3", "--gpu", "80GiB"], "error: --max-batch finds B\n  leave out  -b"),
        (["--max-seq", "-s", "3", "--gpu", "80GiB"], "error: --max-seq finds S\n  leave out  -s"),
        (["-s", "512,1024"], "error: GPT accepts sequences of at most 256 tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(arguments: list[str], error: str) -> None:
    result = run(*ARGUMENTS, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in result.stderr
