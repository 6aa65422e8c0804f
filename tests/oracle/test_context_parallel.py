"""context-parallel against PyTorch's ring attention on real processes: each rank's bytes at start, peak and end."""

from __future__ import annotations

from pathlib import Path

import pytest

import memir
from memir.analysis.liveness import timeline
from memir.ir.verify import verify
from memir.passes.context_parallel import ContextParallel
from memir.recipe import Recipe
from memir.runtime.ranks import real_ranks

ROOT = Path(__file__).parents[2]
RECIPE = Recipe(target="cpu", dtype="f32")
BATCH = 2
LLAMA = ("examples/llama.py:small", {"n_layers": "2", "dim": "128"})
GPT = ("examples/gpt.py", {"n_embd": "64", "n_layer": "2", "n_head": "4", "vocab_size": "512", "block_size": "256"})
HF_LLAMA = (
    "llama-3.2-1b",
    {
        "hidden_size": "64",
        "intermediate_size": "128",
        "num_hidden_layers": "2",
        "num_attention_heads": "4",
        "num_key_value_heads": "4",
        "head_dim": "16",
        "vocab_size": "512",
        "tie_word_embeddings": "false",
    },
)


@pytest.mark.parametrize(
    ("model", "options", "seq"),
    [
        (LLAMA, {"degree": 2}, 256),
        (LLAMA, {"degree": 2, "balance": False}, 256),
        (LLAMA, {"degree": 4, "rotate": "all-to-all"}, 256),
        (LLAMA, {"degree": 4}, 256),
        (GPT, {"degree": 2}, 256),
        (HF_LLAMA, {"degree": 2}, 256),
    ],
    ids=["llama", "llama in order", "llama on 4, all-to-all", "llama on 4", "gpt", "Hugging Face's llama"],
)
def test_every_rank(
    model: tuple[str, dict[str, str]], options: dict[str, object], seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    target, sets = model
    degree = int(str(options["degree"]))
    words = " ".join(f"{name}={str(value).lower()}" for name, value in options.items())
    real = real_ranks(target, RECIPE, BATCH, seq // degree, sets, f"context-parallel{{{words}}}")
    traced = memir.trace(target, RECIPE, batch=BATCH, seq=seq // degree, sets=sets)
    for rank, measured in enumerate(real):
        program = ContextParallel(rank=rank, **options).run(traced.program)  # type: ignore[arg-type]
        verify(program)
        numbers = timeline(program).evaluate({"B": BATCH, "S": seq})
        assert (numbers.start, numbers.after[-1]) == (measured.at_start, measured.at_end), rank
        assert abs(numbers.peak - measured.peak) <= measured.peak // 1000, rank
