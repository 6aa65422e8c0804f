"""Fused and chunked losses: which models they take, what stays, and Liger's published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memir
from memir.errors import UsageError
from memir.ir.core import Program, Value
from memir.ir.liger import RULES, chunk_rows
from memir.ir.size import Size
from memir.recipe import Lora, Recipe

MIB = 2**20
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4096, 128)
        self.head = nn.Linear(128, 4096, bias=BIAS)

    def forward(self, ids, targets):
        logits = self.head(self.table(ids))
        LINE
        return logits, loss
"""


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "config.json")


def model(folder: Path, line: str, bias: bool = False) -> str:
    path = folder / "model.py"
    path.write_text(MODEL.replace("LINE", line).replace("BIAS", str(bias)))
    return str(path)


FLAT = "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))"


def operators(program: Program, word: str) -> list[str]:
    return [op.opcode for _, op in program.ops() if word in op.opcode]


@pytest.mark.parametrize(
    "line",
    [
        FLAT,
        "loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)",
        "loss = F.cross_entropy(logits[:, :-1].contiguous().view(-1, 4096), targets[:, 1:].reshape(-1))",
        "loss = F.cross_entropy(logits[..., :-1, :].float().reshape(-1, 4096), targets[:, 1:].reshape(-1))",
        "b, s, v = logits.shape; loss = F.cross_entropy(logits.view(b * s, v), targets.view(b * s))",
    ],
)
def test_a_file_whose_head_is_followed_by_cross_entropy(tmp_path: Path, line: str) -> None:
    program = memir.trace(model(tmp_path, line), Recipe(loss="fused-linear"), batch=2, seq=32).program
    assert operators(program, "liger") == ["liger.fused_linear_cross_entropy"]
    assert not operators(program, "log_softmax")
    assert max(s.nbytes.evaluate({"B": 2, "S": 32}) for s in program.storages if not s.live_in) < 2 * 64 * 4096 * 4


@pytest.mark.parametrize(
    ("line", "bias", "message"),
    [
        ("logits = logits * 0.5; loss = F.cross_entropy(logits.view(-1, 4096), targets.view(-1))", False, "arithmetic"),
        ("loss = F.cross_entropy(torch.tanh(logits).view(-1, 4096), targets.view(-1))", False, "tanh"),
        ("loss = F.cross_entropy(logits.transpose(1, 2), targets)", False, r"\.transpose"),
        ("loss = F.cross_entropy(logits.view(-1, 4096), targets.view(-1), label_smoothing=0.1)", False, "label smoothing"),
        ("loss = self.table(ids).float().mean()", False, "no F.cross_entropy took the output of head"),
        (FLAT, True, "the head head has a bias"),
    ],
)
def test_a_file_that_computes_with_its_logits_is_refused(tmp_path: Path, line: str, bias: bool, message: str) -> None:
    target = model(tmp_path, line, bias)
    with pytest.raises(UsageError, match=message):
        memir.trace(target, Recipe(loss="fused-linear"), batch=2, seq=32)


def test_recipes_that_are_refused(llama: str) -> None:
    with pytest.raises(UsageError, match="Liger's kernel for cuda"):
        Recipe(loss="fused-linear", target="cpu")
    with pytest.raises(UsageError, match="under autocast is not described"):
        Recipe(loss="fused-linear", amp="bf16", dtype="f32")
    with pytest.raises(UsageError, match="'liger' is none of"):
        Recipe(loss="liger")


@pytest.mark.parametrize(("name", "extra"), [("fused-linear", 6), ("fused-linear-fp32", 4), ("fused-linear-0.4", 0)])
def test_gradients_are_made_in_forward(llama: str, name: str, extra: int) -> None:
    """64 tokens, 32 times as many words as hidden units: 2 tokens a chunk. bf16; the head's gradient is one of its matrix."""
    program = memir.trace(llama, Recipe(loss=name), batch=2, seq=32).program
    (op,) = (op for _, op in program.ops() if op.opcode.startswith("liger."))
    assert [[str(e) for e in r.shape] for r in op.results] == [[], ["B*S", "128"], ["4096", "128"]]
    matrix, rows = 4096 * 128, 2
    expected = {
        "fused-linear": 64 * 5 + 6 * matrix + rows * 4096 * 2,
        "fused-linear-fp32": 64 * 5 + 4 * matrix + rows * 4096 * 2,
        "fused-linear-0.4": 64 * 5 + rows * 4096 * 8,
    }
    assert op.scratch.evaluate({"B": 2, "S": 32}) == expected[name]
    assert op.scratch.evaluate({"B": 2, "S": 32}) // matrix == extra


def test_a_frozen_head_has_no_gradient(llama: str) -> None:
    recipe = Recipe(loss="fused-linear", lora=Lora(r=4, targets=("q_proj",)))
    (op,) = (op for _, op in memir.trace(llama, recipe, batch=2, seq=32).program.ops() if op.opcode.startswith("liger."))
    assert len(op.results) == 2
    assert op.scratch.evaluate({"B": 2, "S": 32}) == 64 * 5 + 2 * 2 * 4096 * 2


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 1000, 1024, 1025, 4096, 16384])
def test_rows_of_a_chunk_in_symbols_are_those_in_numbers(tokens: int) -> None:
    symbols = chunk_rows(Size.of("B") * Size.of("S"), 128256, 4096)
    expected = 1
    while expected < -(-tokens // 32):
        expected *= 2
    assert symbols.evaluate({"B": 1, "S": tokens}) == chunk_rows(Size.of(tokens), 128256, 4096).constant == expected


# github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv: fused_linear_cross_entropy, liger-kernel 0.4.2,
# H=4096, V=128256, bf16, forward and backward on an A100; tokens -> MiB of max_memory_allocated.
PUBLISHED = {4096: 4245.5478515625, 16384: 4910.4384765625}
PUBLISHED_TORCH = {4096: 6092.2822265625, 16384: 15302.3759765625}
HIDDEN, WORDS = 4096, 128256
WORKSPACES = 2 * 8519680  # cuBLAS's, of the main thread and autograd's


def published_run(tokens: int) -> float:
    """The benchmark (benchmark_fused_linear_cross_entropy.py) by the rule: MiB at its peak, in a forward after the first.

    Two models' heads are there, this one's gradient, the input and its gradient, and the targets.
    """

    def value(name: str, *extents: int) -> Value:
        sizes = tuple(map(Size.of, extents))
        return Value(name, "bf16", sizes, sizes, Size.of(0), name)

    given, weight = value("x", tokens, HIDDEN), value("w", WORDS, HIDDEN)
    scratch = RULES["cuda", "liger.fused_linear_cross_entropy_0_4"]([given, weight], [value("loss"), given, weight])
    matrix, row = 2 * WORDS * HIDDEN, 2 * HIDDEN
    return (3 * matrix + tokens * (2 * row + 8) + (tokens * row + matrix) + scratch.evaluate({}) + WORKSPACES) / MIB


def test_ligers_published_figures() -> None:
    """What is left is at most the MiB that the allocator does not split off a block."""
    assert abs(published_run(4096) - PUBLISHED[4096]) < 0.05
    assert 0 <= PUBLISHED[16384] - published_run(16384) < 1.05
    measured = (PUBLISHED[16384] - PUBLISHED[4096]) * MIB / (12288 * WORDS)
    assert f"{measured:.2f}" == f"{(published_run(16384) - published_run(4096)) * MIB / (12288 * WORDS):.2f}" == "0.44"


def test_torchs_bytes_a_logit(tmp_path: Path) -> None:
    """A bf16 head and F.cross_entropy: 6 bytes a logit beside the input, and in the benchmark's loop the input's gradient."""
    program = memir.trace(model(tmp_path, FLAT), Recipe(), batch=2, seq=64).program
    peak = memir.peak(program)
    more = peak.evaluate({"B": 4, "S": 1024})[0] - peak.evaluate({"B": 2, "S": 1024})[0]
    ours = more / 2048 - 128 * 2
    published = (PUBLISHED_TORCH[16384] - PUBLISHED_TORCH[4096]) * MIB / 12288 - HIDDEN * 2 * 2
    assert f"{ours / 4096:.1f}" == f"{published / WORDS:.1f}" == "6.0"
