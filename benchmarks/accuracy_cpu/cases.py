"""The cases: which model is trained by which recipe at which batch and sequence length."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accuracy_cpu.models import CONFIGS, DEFAULT_SHAPE, EAGER_ONLY, FILES, LORA_TARGETS, SHAPES, WITH_DROPOUT
from memir.recipe import Lora, Recipe

_EVERYWHERE = ("plain", "checkpoint", "lora", "keep-outputs")
_IN_TURN = (("eager", "foreach"), ("padded", "accumulate"), ("eager", "zero-first"))  # taken in turn by the models
_THOROUGH = (  # for the models in _THOROUGHLY, besides those above
    "foreach",
    "eager",
    "padded",
    "accumulate",
    "bf16",
    "bf16-checkpoint",
    "checkpoint-lora",
    "clip",
    "eager-padded",
    "forward",
    "forward-keep-outputs",
    "fused",
    "zero-first",
    "zero-first-keep-outputs",
    "sgd",
    "adafactor",
    "rmsprop",
    "accumulate-clip-zero-first",
)
_THOROUGHLY = ("gpt2", "llama", "gemma3_text", "bloom", "mixtral", "examples/llama.py")


@dataclass(frozen=True, slots=True)
class Case:
    """One training step. `model` is a key of CONFIGS or FILES."""

    model: str
    recipe_name: str
    recipe: Recipe
    batch: int
    seq: int

    @property
    def name(self) -> str:
        """`gpt2/checkpoint`."""
        return f"{self.model}/{self.recipe_name}"


def _recipe(name: str, model: str) -> Recipe:
    targets = LORA_TARGETS.get(model, LORA_TARGETS.get(str(CONFIGS.get(model, {}).get("model_type")), ("q_proj", "v_proj")))
    lora = Lora(r=8, alpha=16, targets=targets)
    options: dict[str, dict[str, object]] = {
        "plain": {},
        "foreach": {"optimizer_impl": "foreach"},
        "fused": {"optimizer_impl": "fused"},
        "eager": {"attention": "eager"},
        "checkpoint": {"checkpoint": "full"},
        "lora": {"lora": lora},
        "checkpoint-lora": {"checkpoint": "full", "lora": lora},
        "dropout-off": {"dropout": False},
        "padded": {"batch_kind": "padded"},
        "eager-padded": {"attention": "eager", "batch_kind": "padded"},
        "keep-outputs": {"keep_outputs": True},
        "zero-first": {"zero_grad": "first"},
        "zero-first-keep-outputs": {"zero_grad": "first", "keep_outputs": True},
        "accumulate": {"accumulate": 2},
        "accumulate-clip-zero-first": {"accumulate": 3, "clip": 1.0, "zero_grad": "first", "optimizer_impl": "foreach"},
        "clip": {"clip": 1.0},
        "sgd": {"optimizer": "sgd"},
        "adafactor": {"optimizer": "adafactor"},
        "rmsprop": {"optimizer": "rmsprop", "optimizer_impl": "foreach"},
        "forward": {"mode": "forward"},
        "forward-keep-outputs": {"mode": "forward", "keep_outputs": True},
        "bf16": {"dtype": "bf16"},
        "bf16-checkpoint": {"dtype": "bf16", "checkpoint": "full", "optimizer_impl": "foreach"},
    }
    return Recipe(**{"target": "cpu", "dtype": "f32", **options[name]})  # type: ignore[arg-type]


def _recipes(model: str, number: int) -> list[str]:
    if model.endswith("-routed"):
        return ["plain", "checkpoint"]
    names = [*_EVERYWHERE, *(_THOROUGH if model in _THOROUGHLY else _IN_TURN[number % len(_IN_TURN)])]
    if model in WITH_DROPOUT:
        names.append("dropout-off")
    if model in EAGER_ONLY or model in FILES:
        names = [name for name in names if "eager" not in name]
    if model in FILES:  # their forward takes no mask
        names = [name for name in names if "padded" not in name]
    return names


def all_cases() -> list[Case]:
    """Every case, in the order of models and recipes."""
    cases = []
    for number, model in enumerate([*CONFIGS, *FILES]):
        batch, seq = SHAPES.get(model, DEFAULT_SHAPE)
        cases += [Case(model, name, _recipe(name, model), batch, seq) for name in _recipes(model, number)]
    return cases
