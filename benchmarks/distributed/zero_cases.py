"""What DeepSpeed is run on: small models, every option of `zero` that changes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from memir.recipe import Recipe

BATCH, SEQ = 2, 64
_GPT = (("n_layer", "3"), ("n_embd", "128"), ("n_head", "4"), ("vocab_size", "512"))
_LLAMA = (
    ("num_hidden_layers", "3"),
    ("hidden_size", "128"),
    ("intermediate_size", "344"),
    ("num_attention_heads", "4"),
    ("num_key_value_heads", "2"),
    ("vocab_size", "509"),
)
_WIDE = (*_LLAMA[:1], ("hidden_size", "256"), ("intermediate_size", "1024"), *_LLAMA[3:])


@dataclass(frozen=True, slots=True)
class Case:
    """A step and the method on it; `method` is the text of DeepSpeed's run and of the pass alike."""

    name: str
    target: str
    sets: tuple[tuple[str, str], ...]
    recipe: Recipe
    method: str


def _recipe(*, accumulate: int = 1, clip: float = 0.0, checkpoint: str = "none") -> Recipe:
    return Recipe(target="cpu", dtype="bf16", accumulate=accumulate, clip=clip, checkpoint=checkpoint)


def _cases() -> list[Case]:
    gpt = ("examples/gpt.py", _GPT, _recipe())
    tied = ("gpt2", _GPT, _recipe(accumulate=2))
    llama = ("llama-3-8b", _LLAMA, _recipe())
    again = ("llama-3-8b", _LLAMA, _recipe(clip=1.0, checkpoint="full"))
    wide = ("llama-3-8b", _WIDE, _recipe(checkpoint="full"))
    frozen = ("tests/cases/frozen_llama.py:frozen", (("cut", "2"),), _recipe())
    near = "reduce-bucket-size=100000 param-persistence-threshold=100"
    listed = [
        ("gpt-1-overlap", *gpt, "stage=1 reduce-bucket-size=200000 overlap-comm=true"),
        ("gpt-2", *gpt, "stage=2 reduce-bucket-size=200000"),
        ("gpt-3", *gpt, "stage=3 reduce-bucket-size=200000 param-persistence-threshold=1000 prefetch-bucket-size=150000"),
        ("gpt2-1-accumulate", *tied, "stage=1 reduce-bucket-size=3000000"),
        ("gpt2-2-accumulate", *tied, "stage=2 reduce-bucket-size=3000000"),
        (
            "gpt2-3-accumulate",
            *tied,
            "stage=3 reduce-bucket-size=100000 param-persistence-threshold=500 sub-group-size=100000 max-reuse-distance=100000",
        ),
        ("gpt2-3-offload", *tied, "stage=3 reduce-bucket-size=100000 offload-optimizer offload-param"),
        ("gpt2-2-offload", *tied, "stage=2 reduce-bucket-size=300000 offload-optimizer"),
        ("llama-2-offload", *llama, "stage=2 offload-optimizer reduce-bucket-size=300000"),
        ("llama-3-default", *llama, "stage=3 reduce-bucket-size=500000"),
        (
            "llama-3-reuse",
            *llama,
            "stage=3 reduce-bucket-size=1000 param-persistence-threshold=1000 prefetch-bucket-size=50000"
            " max-reuse-distance=10000",
        ),
        ("llama-2-checkpoint-overlap", *again, "stage=2 reduce-bucket-size=3000000 overlap-comm=true"),
        ("llama-2-checkpoint-copies", *again, "stage=2 contiguous-gradients=false reduce-bucket-size=100000"),
        ("llama-1-checkpoint-robin", *again, "stage=1 round-robin-gradients reduce-bucket-size=2000000"),
        ("wide-3-prefetch", *wide, f"stage=3 {near} prefetch-bucket-size=300000 max-reuse-distance=0"),
        ("wide-3-alone", *wide, f"stage=3 {near} prefetch-bucket-size=0 max-live-parameters=100000 max-reuse-distance=0"),
        ("frozen-1", *frozen, "stage=1 reduce-bucket-size=300000"),
        ("frozen-2", *frozen, "stage=2 reduce-bucket-size=300000"),
        ("frozen-3", *frozen, "stage=3 reduce-bucket-size=300000 param-persistence-threshold=1000 prefetch-bucket-size=150000"),
    ]
    return [Case(name, target, sets, recipe, f"zero{{degree=2 {text}}}") for name, target, sets, recipe, text in listed]


CASES = _cases()
