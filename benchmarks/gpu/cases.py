"""The steps that are measured: models of 0.1 to 1.5 billion parameters, each a preset, and the recipe they are trained by."""

from __future__ import annotations

from dataclasses import dataclass, field

from memir.recipe import Lora, Recipe

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Case:
    """One training step."""

    name: str
    preset: str
    recipe: Recipe
    batch: int
    seq: int
    sets: dict[str, str] = field(default_factory=dict)


CASES = (
    Case("gpt2 bf16", "gpt2", Recipe(), 8, 1024),
    Case("gpt2 amp bf16", "gpt2", Recipe(dtype="f32", amp="bf16"), 8, 1024),
    Case("gpt2 f32 eager", "gpt2", Recipe(dtype="f32", attention="eager"), 4, 512),
    Case("qwen2.5-0.5b bf16 fused", "qwen2.5-0.5b", Recipe(optimizer_impl="fused"), 2, 2048),
    Case("qwen2.5-0.5b amp fp16, clipped", "qwen2.5-0.5b", Recipe(dtype="f32", amp="f16", clip=1.0), 2, 1024),
    Case("smollm2-360m bf16, outputs kept", "smollm2-360m", Recipe(keep_outputs=True), 4, 1024),
    Case("smollm2-360m bf16 for-loop", "smollm2-360m", Recipe(optimizer_impl="for-loop", zero_grad="first"), 4, 1024),
    Case("llama-3.2-1b bf16 checkpoint", "llama-3.2-1b", Recipe(checkpoint="full"), 2, 4096),
    Case("llama-3.2-1b bf16 LoRA", "llama-3.2-1b", Recipe(lora=Lora(r=16, targets=ATTENTION)), 2, 2048),
    Case("tinyllama-1.1b amp bf16 checkpoint", "tinyllama-1.1b", Recipe(dtype="f32", amp="bf16", checkpoint="full"), 4, 2048),
    Case("gemma-3-1b bf16 checkpoint", "gemma-3-1b", Recipe(checkpoint="full"), 1, 2048),
    Case("gpt2-medium bf16 accumulate", "gpt2-medium", Recipe(accumulate=2), 4, 1024),
)
