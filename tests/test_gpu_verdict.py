"""What PyTorch holds on a GPU beside the tensors, by card and release, and the verdict that follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import memir
from memir.api import installed_torch, on_gpu
from memir.backends.explain import Explain
from memir.backends.json import as_dict
from memir.backends.markdown import Markdown
from memir.backends.text import Text
from memir.cli import main
from memir.cuda.context import CONTEXTS, context, cublas_workspace, workspaces
from memir.cuda.nccl import nccl_buffers
from memir.cuda.platform import platform
from memir.cuda.verdict import Verdict, judge, room
from memir.errors import UsageError
from memir.hardware import Card, cards, find_card, parse_gpu
from memir.ir.core import Op
from memir.recipe import Recipe
from memir.report import verdict_text
from tests.test_backends import SCHEMA, report

MIB = 2**20
PRODUCTS = [Op("aten.mm")]
SMALL_GPT = str(Path(__file__).parent / "cases" / "small_gpt.py")


@pytest.mark.parametrize(
    ("gpu", "torch", "expected"),
    [  # aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: :4096:2:16:8, or 32 MiB
        ("7.5", "2.10", 8_519_680),
        ("8.0", "2.13", 8_519_680),
        ("8.9", "2.13", 8_519_680),
        ("9.0", "2.6", 32 * MIB),
        ("10.0", "2.11", 8_519_680),
        ("10.0", "2.12", 32 * MIB),  # pull request 175344
        ("12.0", "2.13", 32 * MIB),
    ],
)
def test_the_workspace_of_a_cublas_handle(gpu: str, torch: str, expected: int) -> None:
    assert cublas_workspace(gpu, torch) == expected


@pytest.mark.parametrize(
    ("opcode", "torch", "trains", "expected"),
    [
        ("aten.mm", "2.13", True, [2 * 8_519_680]),  # the main thread's and that of autograd's
        ("aten.mm", "2.13", False, [8_519_680]),
        ("aten.addmm", "2.13", True, [2 * 8_519_680]),  # cuBLASLt takes cuBLAS's: pull request 175879
        ("aten.addmm", "2.10", True, [2 * 8_519_680, MIB]),
        ("aten.addmm", "2.7", True, [2 * 8_519_680]),  # freed after the product
        ("aten.add.Tensor", "2.13", True, []),
    ],
)
def test_what_a_step_makes_pytorch_hold(opcode: str, torch: str, trains: bool, expected: list[int]) -> None:
    held = workspaces(platform("8.0", torch), [Op(opcode)], trains=trains)
    assert [term.nbytes for term in held] == expected
    assert all(term.name for term in held)


def test_contexts_are_ranges_with_sources() -> None:
    for row in CONTEXTS:
        assert 100 < row.low <= row.high < 1000
        assert row.source
        assert not row.key or find_card(row.key) is not None
    assert context(find_card("t4"))[0] == round(140.9 * MIB)  # fitcheck-llm's 40 rows in published.csv
    assert context(find_card("h100")) == context(None)


def test_the_terms_of_a_card() -> None:
    found = judge(parse_gpu("t4"), PRODUCTS, 10 * MIB, trains=True, torch="2.10.0")
    assert (found.card, found.compute, found.capacity) == ("Tesla T4", "7.5", 14930 * MIB)
    low, high = context(find_card("t4"))
    assert found.needed == (10 * MIB + 2 * 8_519_680 + low, 10 * MIB + 2 * 8_519_680 + high)
    assert found.answer == "fits"


def test_an_amount_is_what_tensors_may_take() -> None:
    assert judge(parse_gpu("1GiB"), PRODUCTS, 2**30, trains=True, torch="2.13").answer == "fits"
    assert judge(parse_gpu("1GiB"), PRODUCTS, 2**30 + 1, trains=True, torch="2.13").answer == "does not fit"
    assert room(parse_gpu("1GiB"), trains=True, torch="2.13") == parse_gpu("1GiB")


@given(st.sampled_from(cards()), st.booleans(), st.integers(0, 2**38))
def test_the_verdict_and_the_room_of_a_card_agree(card: Card, trains: bool, allocated: int) -> None:
    gpu = parse_gpu(card.key)
    found = judge(gpu, [Op("aten.addmm")], allocated, trains=trains, torch="2.13")
    low, high = found.needed
    assert allocated < low <= high
    assert (found.answer == "fits") == (allocated <= room(gpu, trains=trains, torch="2.13").nbytes)
    assert (found.answer == "does not fit") == (low > card.capacity)


def test_tight_is_between() -> None:
    card = parse_gpu("t4")
    least, most = context(card.card)
    allocated = card.nbytes - (least + most) // 2
    assert judge(card, [], allocated, trains=True, torch="2.13").answer == "tight"


def test_reserved_bytes_decide_where_they_are_known() -> None:
    found = judge(parse_gpu("t4"), PRODUCTS, 10 * MIB, trains=True, torch="2.13")
    assert replace(found, reserved=14930 * MIB).answer == "does not fit"
    assert replace(found, reserved=20 * MIB).needed[0] == 20 * MIB + found.context[0]


@pytest.mark.parametrize("gpu", ["t4", "nvidia rtx pro 6000 blackwell", "1GiB"])
def test_every_output_says_it(gpu: str) -> None:
    verdict = judge(parse_gpu(gpu), PRODUCTS, 10 * MIB, trains=True, torch="2.13")
    found = replace(report(), verdict=verdict)
    line = next(line for line in Text().render(found).splitlines() if line.startswith("  fits "))
    assert "0.01 allocated" in line
    assert len(line) <= 100
    assert f"**Fits** {gpu}: 0.01 allocated" in Markdown().render(found)
    assert f"  fits {gpu}" in Explain().render(found)
    document = as_dict(found)
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert document["gpu"]["verdict"] == "fits"
    assert document["gpu"]["needed_bytes"] == list(verdict.needed)
    assert as_dict(report())["gpu"] is None


def test_analyze_takes_the_kernels_of_the_card() -> None:
    found = memir.analyze(SMALL_GPT, Recipe(dtype="f16"), batch=2, seq=32, gpu="t4", cache=False)
    assert isinstance(found.verdict, Verdict)
    assert found.verdict.allocated == found.peak.allocated
    assert found.verdict.answer == "fits"
    assert ("gpu", "7.5") in found.recipe
    assert any("efficient_attention" in group.op for group in found.top)


def test_a_recipe_on_a_gpu() -> None:
    assert on_gpu(Recipe(), parse_gpu("h100")).gpu == "9.0"
    assert on_gpu(Recipe(), parse_gpu("80GiB")).gpu == ""
    assert on_gpu(Recipe(gpu="8.0"), parse_gpu("h100")).gpu == "8.0"
    assert installed_torch()[:2] == "2."
    with pytest.raises(UsageError, match="the target is cpu"):
        on_gpu(Recipe(target="cpu"), parse_gpu("h100"))


@pytest.mark.parametrize(("gpu", "code", "start"), [("100KiB", 1, "  does not fit 100KiB   "), ("1GiB", 0, "  fits 1GiB   ")])
def test_the_command_line_answers(gpu: str, code: int, start: str) -> None:
    result = CliRunner().invoke(main, ["analyze", SMALL_GPT, "-b", "2", "-s", "32", "--gpu", gpu])
    assert result.exit_code == code
    assert any(line.startswith(start) for line in result.stdout.splitlines())


def test_several_ranks_have_nccls_buffers() -> None:
    alone = judge(parse_gpu("t4"), PRODUCTS, 10 * MIB, trains=True, torch="2.10.0")
    mesh = judge(parse_gpu("t4"), PRODUCTS, 10 * MIB, trains=True, torch="2.10.0", axes=2)
    added = (mesh.needed[0] - alone.needed[0], mesh.needed[1] - alone.needed[1])
    assert added == mesh.nccl == nccl_buffers(2) == (2 * 8 * MIB, 2 * 32 * 5 * (4 * MIB + 524_288 + 4_915_200))
    assert verdict_text(mesh).startswith(verdict_text(alone).partition(" of ")[0])
    assert " NCCL of " in verdict_text(mesh)
    assert " NCCL" not in verdict_text(alone)
    assert judge(parse_gpu("14GiB"), PRODUCTS, 10 * MIB, trains=True, torch="2.10.0", axes=2).nccl == (0, 0)
