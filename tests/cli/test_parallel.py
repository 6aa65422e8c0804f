"""`--parallel` and its shorthands on the command line: the mesh, a pipeline's stages, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from memir.cli import main

ROOT = Path(__file__).resolve().parents[2]
GPT = [str(ROOT / "examples/gpt.py"), "-b", "2", "-s", "64", "--no-cache"]
GPT += [word for text in ("n_layer=4", "n_embd=64", "n_head=2", "vocab_size=512") for word in ("--set", text)]


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["analyze", *GPT, *words])
    return result.exit_code, result.stdout, result.stderr


def test_a_pipeline_shows_every_stage() -> None:
    code, text, _ = run("--parallel", "pipeline-parallel{degree=2 tied=copy}", "--format", "json")
    assert code == 0
    found = json.loads(text)
    jsonschema.validate(found, json.loads((ROOT / "docs/analyze.schema.json").read_text(encoding="utf-8")))
    assert found["mesh"] == {"pipeline-parallel": 2}
    peaks = [stage["allocated_bytes"] for stage in found["stages"]]
    assert len(peaks) == 2
    assert found["peak"]["allocated_bytes"] == max(peaks)
    for form, word in (("text", "this is stage"), ("markdown", "| Stage |"), ("explain", "  stage 1")):
        assert word in run("--parallel", "pipeline-parallel{degree=2 tied=copy}", "--format", form)[1]


def test_one_rank_of_several() -> None:
    code, text, _ = run("--ddp", "4")
    assert code == 0
    assert "one rank of 4: data-parallel 4" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parallel", "fsdq{degree=2}"), "fsdq"),
        (("--parallel", "data-parallel{degree=0}"), "degree 0"),
        (("--ddp", "2", "--parallel", "fsdp{degree=2}"), "--parallel and --ddp at once"),
        (("--pp", "2"), "tied"),
        (("--parallel", "pipeline-parallel{degree=9}"), "9"),
        (("--zero", "2"), "over how many ranks"),
        (("--ep", "2"), "no expert's weights are stacked"),
        (("--fsdp", "99999999999"), "more ranks than there are GPUs"),
        (("--parallel", "fsdp{degree=2 replicate=0}"), "replicate 0"),
        (("--parallel", "data-parallel{degree=2},fsdp{degree=2}"), "made copies of the model already"),
        (("--parallel", "fsdp{degree=2},fsdp1{degree=2}"), "made copies of the model already"),
        (("--parallel", "fsdp{degree=2},tensor-parallel{degree=2}"), "here  tensor-parallel, fsdp"),
        (("--parallel", "pipeline-parallel{degree=2},context-parallel{degree=2}"), "here  context-parallel, pipeline-parallel"),
        (("--pp", "2", "--accumulate", "4"), "pipeline-parallel{degree=2 microbatches=4}"),
        (("--parallel", "fsdp{degree=d}"), "a degree is a number here"),
        (("--cp", "3"), "S=60 or S=66"),
        (("--exact",), "--exact: traces a distributed method"),
        (("--parallel", "pipeline-parallel{degree=2 tied=copy stage=5}"), "stage 5 of 2"),
        (("--lora", "r=8"), "no default LoRA targets"),
    ],
)
def test_bad_input_is_exit_2(words: tuple[str, ...], message: str) -> None:
    code, _, error = run(*words)
    assert code == 2
    assert message in error


def test_one_stage_where_it_is_named_and_a_degree_of_1_is_told() -> None:
    code, text, _ = run("--parallel", "pipeline-parallel{degree=2 tied=copy stage=1}", "--format", "json")
    assert code == 0
    assert json.loads(text)["stages"] == []
    assert "a degree of 1 changes nothing" in run("--parallel", "fsdp")[1]


def test_the_stage_of_zero_is_in_the_mesh_and_its_bucket_is_told() -> None:
    code, text, _ = run("--zero", "2", "--ddp", "2")
    assert code == 0
    assert "one rank of 2: zero-2 2" in text
    assert "DeepSpeed's default reduce-bucket-size" in " ".join(text.split())


def test_a_recipe_of_llmem() -> None:
    """Parameters are gathered in fp16, a quarter of them and of both states is there in fp32."""
    words = ("--dtype", "f16", "--format", "json")
    code, text, _ = run("--parallel", "llmem-adp", *words)
    assert code == 0
    found = json.loads(text)
    assert found["mesh"] == {"fsdp": 4}
    same = json.loads(run("--parallel", "fsdp{degree=4 reshard=false param-dtype=f16}", *words)[1])
    assert found["peak"] == same["peak"]


def test_pytorch_s_own_code_beside_the_passes() -> None:
    text = " ".join(run("--fsdp", "2", "--exact")[1].split())
    assert "traced on a fake rank, takes" in text
    assert "the passes differ by +0" in text
    assert "--exact is not possible: data-parallel" in " ".join(run("--ddp", "2", "--exact")[1].split())


def test_a_sweep_wants_one_stage() -> None:
    words = ["sweep", GPT[0], "-b", "2", "-s", "64", "--no-cache", *GPT[6:], "--pp", "2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "which stage" in result.stderr
