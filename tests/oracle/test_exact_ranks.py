"""The trace of one rank through PyTorch's own FSDP2 and DTensor against real ranks, in bytes."""

from __future__ import annotations

import pytest

from memir.analysis.liveness import timeline
from memir.frontend.exact import trace_rank
from memir.frontend.load import load_target
from memir.frontend.parallel import parse_methods
from memir.recipe import Lora, Recipe
from memir.runtime.ranks import real_ranks

SCALARS = 64  # bytes; Python numbers that an operator makes a tensor of for its own length
LLAMA = {
    "num_hidden_layers": "2",
    "hidden_size": "128",
    "intermediate_size": "344",
    "num_attention_heads": "8",
    "num_key_value_heads": "4",
    "vocab_size": "1000",
}


@pytest.mark.parametrize(
    ("target", "sets", "methods", "options"),
    [
        pytest.param("examples/llama.py:small", {}, "fsdp{degree=2}", {}, id="fsdp"),
        pytest.param("llama-3-8b", LLAMA, "fsdp{degree=2}", {"checkpoint": "full", "dtype": "bf16"}, id="fsdp-checkpoint"),
        pytest.param(
            "llama-3-8b", LLAMA, "fsdp{degree=2 param-dtype=bf16 reduce-dtype=f32}", {"lora": Lora(r=4)}, id="fsdp-lora"
        ),
        pytest.param("llama-3-8b", LLAMA, "tensor-parallel{degree=2}", {}, id="tensor"),
        pytest.param(
            "examples/llama.py:small",
            {},
            "fsdp{degree=2},tensor-parallel{degree=2 sequence loss}",
            {"clip": 1.0},
            id="fsdp-tensor",
        ),
    ],
)
def test_the_trace_equals_the_real_run(target: str, sets: dict[str, str], methods: str, options: dict[str, object]) -> None:
    recipe = Recipe(**{"target": "cpu", "dtype": "f32", **options})  # type: ignore[arg-type]
    batch, seq = 4, 128
    (real, *_) = real_ranks(target, recipe, batch, seq, sets, methods)
    step = trace_rank(lambda: load_target(target, recipe=recipe, sets=sets), recipe, parse_methods(methods), batch, seq)
    numbers = timeline(step.program).evaluate({})
    assert (numbers.start, numbers.after[-1]) == (real.at_start, real.at_end)
    assert abs(numbers.peak - real.peak) <= SCALARS
