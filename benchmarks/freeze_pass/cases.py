"""The cases: an architecture, a recipe and a cut, or a pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy_cpu.models import CONFIGS, FILES
from memir.recipe import Lora, Recipe

DEPTH = 4
BATCH, SEQ = 2, 32
_PLAIN = Recipe(target="cpu", dtype="f32")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
MODELS = (
    "gpt2",  # tied
    "gpt2-untied",
    "opt",
    "bloom",
    "gpt_neox",
    "codegen",
    "llama",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "falcon",
    "phi",
    "mixtral",
    "examples/gpt.py",
    "examples/llama.py",
)
_RECIPES = {
    "checkpoint": Recipe(target="cpu", dtype="f32", checkpoint="full"),
    "lora": Recipe(target="cpu", dtype="f32", lora=Lora(r=8, alpha=16, targets=("q_proj", "v_proj"))),
    "foreach-clip-zero-first": Recipe(target="cpu", dtype="f32", optimizer_impl="foreach", clip=1.0, zero_grad="first"),
    "accumulate-keep-outputs": Recipe(target="cpu", dtype="f32", accumulate=3, keep_outputs=True),
    "adafactor": Recipe(target="cpu", dtype="f32", optimizer="adafactor"),
}
_PATTERNS = {
    "norms": r"norm|ln_",
    "second-layers": r"(layers|h)\.[02]\.",
    "all-but-last": r"^(?!.*(layers|h)\.3\.)",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training step at BATCH and SEQ with DEPTH layers. `model` is a key of accuracy_cpu's CONFIGS or FILES."""

    model: str
    recipe_name: str
    recipe: Recipe
    cut: int
    pattern: str = ""
    what: str = ""  # the pattern's name

    @property
    def name(self) -> str:
        """`gpt2/plain/cut2`."""
        return f"{self.model}/{self.recipe_name}/{self.what or f'cut{self.cut}'}"


def target(model: str) -> tuple[dict[str, Any] | str, dict[str, str]]:
    """What config.json holds, or the file's path, and `--set` values."""
    if model in FILES:
        path, sets = FILES[model]
        return path, {field: str(DEPTH) if field in _LAYERS else value for field, value in sets.items()}
    return {field: DEPTH if field in _LAYERS else value for field, value in CONFIGS[model].items()}, {}


def all_cases() -> list[Case]:
    """Every case; those of one model and recipe follow each other."""
    cases = [Case(model, "plain", _PLAIN, cut) for model in MODELS for cut in (0, 1, 2, DEPTH - 1, DEPTH)]
    cases += [Case("llama", name, recipe, cut) for name, recipe in _RECIPES.items() for cut in (1, 2, DEPTH - 1)]
    for model in ("llama", "gpt2"):
        cases += [Case(model, "plain", _PLAIN, 0, pattern, what) for what, pattern in _PATTERNS.items()]
    return cases
