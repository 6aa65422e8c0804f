"""What is run: PyTorch's methods on small models, each with the pass that says the same. DeepSpeed has a table of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from memir.recipe import Lora, Recipe

LLAMA = ("examples/llama.py:small", {"n_layers": "3", "dim": "128"})
GPT = ("examples/gpt.py", {"n_embd": "128", "n_layer": "3", "n_head": "4", "vocab_size": "1000", "block_size": "512"})
_SMALL = {
    "num_hidden_layers": "3",
    "hidden_size": "128",
    "intermediate_size": "344",
    "num_attention_heads": "8",
    "num_key_value_heads": "4",
    "vocab_size": "1000",
}
HF = ("llama-3-8b", _SMALL)
QWEN = ("qwen2.5-7b", _SMALL)
GPT2 = ("gpt2", {"n_layer": "3", "n_embd": "128", "n_head": "4", "vocab_size": "1000", "n_positions": "512"})
MIXTRAL = ("mixtral-8x7b", {**_SMALL, "num_local_experts": "4", "head_dim": "16"})
Model = tuple[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Case:
    """One method on one model: `method` is run for real, `passes` (the same text unless given) are memir's."""

    model: Model
    method: str
    options: dict[str, Any] = field(default_factory=dict)  # of the recipe
    passes: str = ""
    traced_dtype: str = ""  # what the passes' step is traced in, where it is not the parameters' own
    batch: int = 4
    seq: int = 128

    @property
    def name(self) -> str:
        """`llama.py fsdp{degree=2} checkpoint=full`."""
        target = self.model[0].rpartition("/")[2].partition(":")[0]
        said = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([target, self.method, *said])

    @property
    def recipe(self) -> Recipe:
        """On the CPU, f32 unless the options say otherwise."""
        return Recipe(**{"target": "cpu", "dtype": "f32", **self.options})

    @property
    def traced_recipe(self) -> Recipe:
        """Of the step that the passes rewrite."""
        return replace(self.recipe, dtype=self.traced_dtype) if self.traced_dtype else self.recipe

    @property
    def pipeline(self) -> str:
        """The passes' text."""
        return self.passes or self.method


def _ddp(options: str = "", degree: int = 2) -> tuple[str, str]:
    words = " ".join(filter(None, [f"degree={degree}", options]))
    return f"data-parallel{{{words}}}", f"data-parallel{{{words} no-sync=false}}"  # the loop calls no no_sync()


def _cases() -> tuple[Case, ...]:
    both, view, half = _ddp(), _ddp("gradient-as-bucket-view"), _ddp("hook=fp16 bucket-cap-mb=0.25", 4)
    static, brain = _ddp("static-graph"), _ddp("hook=bf16")
    data = (
        Case(LLAMA, both[0], {}, both[1]),
        Case(GPT, view[0], {"checkpoint": "full", "clip": 1.0}, view[1]),
        Case(HF, static[0], {}, static[1]),
        Case(QWEN, brain[0], {}, brain[1]),
        Case(GPT2, half[0], {"accumulate": 2}, half[1]),
    )
    mixed = "param-dtype=bf16 reduce-dtype=f32"
    fsdp = (
        Case(LLAMA, "fsdp{degree=2}"),
        Case(LLAMA, "fsdp{degree=2 reshard=true}"),
        Case(GPT, "fsdp{degree=2 reshard=false}"),
        Case(QWEN, "fsdp{degree=4}", {"checkpoint": "full", "dtype": "bf16"}),
        Case(HF, f"fsdp{{degree=2 {mixed}}}", {"clip": 1.0}, f"fsdp{{degree=2 {mixed} shard-dtype=f32}}", "bf16"),
        Case(HF, "fsdp{degree=2}", {"lora": Lora(r=4)}),
        Case(GPT2, "fsdp{degree=2}"),
        Case(LLAMA, "fsdp{degree=2 replicate=2}"),
        Case(
            HF,
            f"fsdp{{degree=2 replicate=2 {mixed}}}",
            {"checkpoint": "full"},
            f"fsdp{{degree=2 replicate=2 {mixed} shard-dtype=f32}}",
            "bf16",
        ),
        Case(LLAMA, "fsdp{degree=4 reshard=2}"),
        Case(LLAMA, "fsdp{degree=2 forward-prefetch=1 backward-prefetch=2}"),
        Case(HF, "fsdp{degree=2 offload}"),
    )
    flat = (
        Case(LLAMA, "fsdp1{degree=2}", {}, "fsdp1{degree=2 cpu}"),
        Case(HF, "fsdp1{degree=2 strategy=grad-op}", {}, "fsdp1{degree=2 strategy=grad-op cpu}"),
        Case(GPT, "fsdp1{degree=2 backward-prefetch=post}", {}, "fsdp1{degree=2 backward-prefetch=post cpu}"),
    )
    tensor = (
        Case(LLAMA, "tensor-parallel{degree=4}"),
        Case(HF, "tensor-parallel{degree=2}", {"checkpoint": "full"}),
        Case(LLAMA, "tensor-parallel{degree=2 sequence}", {"clip": 1.0}),
        Case(QWEN, "tensor-parallel{degree=2 sequence loss}", {"dtype": "bf16"}),
        Case(HF, "tensor-parallel{degree=4 sequence loss}"),
    )
    both_axes = "tensor-parallel{degree=2 sequence loss}"
    together = (
        Case(LLAMA, f"{both_axes},fsdp{{degree=2}}"),
        Case(
            HF,
            f"{both_axes},fsdp{{degree=2 {mixed}}}",
            {"checkpoint": "full", "clip": 1.0},
            f"{both_axes},fsdp{{degree=2 {mixed} shard-dtype=f32}}",
            "bf16",
        ),
    )
    context = (
        Case(LLAMA, "context-parallel{degree=2}"),
        Case(("llama-3-8b", {**_SMALL, "num_key_value_heads": "8"}), "context-parallel{degree=2 balance=false}"),
        Case(GPT, "context-parallel{degree=4 rotate=all-to-all}"),
        Case(LLAMA, "context-parallel{degree=4 method=ulysses}"),
        Case(HF, "context-parallel{degree=2 method=ulysses}", {"checkpoint": "full"}),
        Case(GPT, "context-parallel{degree=2 method=ulysses}"),
    )
    experts = (
        Case(MIXTRAL, "expert-parallel{degree=2}"),
        Case(MIXTRAL, "expert-parallel{degree=4}", {"dtype": "bf16", "checkpoint": "full"}),
    )
    return (*data, *fsdp, *flat, *tensor, *together, *context, *experts)


CASES = _cases()
