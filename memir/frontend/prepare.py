"""From a loaded module to what is trained: adapters injected, layers checkpointed, dropout set."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from memir.errors import UsageError
from memir.frontend.loaded import LoadedModel
from memir.frontend.losses import fuse_loss
from memir.frontend.quantize import adapt_forward, quantize_linear_layers
from memir.recipe import Lora, Recipe


def prepare(loaded: LoadedModel, recipe: Recipe) -> nn.Module:
    """The module that is trained: adapters injected, checkpointing switched on, dropout set. Works on meta and real modules."""
    module = loaded.module
    if recipe.quantize is not None:
        quantize_linear_layers(loaded, recipe.quantize, recipe.target)
    if recipe.lora is not None:
        module = _inject_lora(module, recipe.lora)
        adapt_forward(module)
    if recipe.mode == "train" and not any(p.requires_grad for p in module.parameters()):
        raise UsageError(
            f"{loaded.name} has no trainable parameter: there is no training step to analyze",
            where=loaded.source,
            hint="set requires_grad on some parameters, or use  --mode forward",
        )
    if recipe.loss != "model":
        fuse_loss(module, loaded, recipe)
    if recipe.checkpoint == "full":
        _checkpoint_layers(module, loaded, recipe)
    if not recipe.dropout:
        _switch_dropout_off(module)
    return module.train()


def _inject_lora(module: nn.Module, lora: Lora) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    if lora.targets:
        options["target_modules"] = list(lora.targets)
    kinds = ("Linear", "Linear4bit", "Linear8bit", "LinearGptq", "Conv1D")  # GPT-2's linear layers are transformers' Conv1D
    linear = sorted({name.rpartition(".")[2] for name, m in module.named_modules() if type(m).__name__ in kinds})
    known = f"linear modules of this model: {', '.join(linear)}"
    try:
        with warnings.catch_warnings():  # PEFT warns about what it cannot know of meta tensors
            warnings.simplefilter("ignore")
            adapted: nn.Module = get_peft_model(module, LoraConfig(**options))
    except (ValueError, AttributeError, KeyError) as error:
        if not lora.targets:
            raise UsageError(
                "PEFT has no default LoRA targets for this model",
                hint=f"name them:  --lora r={lora.r},targets=NAME,...\n{known}",
            ) from error
        if isinstance(error, AttributeError):  # PEFT 0.14 calls .get() on whatever a model has as `config`
            hint = "a newer PEFT may:  pip install --upgrade peft"
            raise UsageError(f"PEFT {version('peft')} cannot adapt this model: {error}", hint=hint) from error
        raise UsageError(f"LoRA targets match nothing: {', '.join(lora.targets)}", hint=known) from error
    return adapted


def _checkpoint_layers(module: nn.Module, loaded: LoadedModel, recipe: Recipe) -> None:
    """`torch.utils.checkpoint` (use_reentrant=False) around every layer; Hugging Face models do it by their own switch.

    Trainer leaves the kind to transformers, where it was reentrant before 5.0.
    """
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if loaded.is_hf and enable is not None:
        try:
            if recipe.loop == "trainer":
                enable()
            else:
                enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if _is_reentrant(module) and recipe.lora is not None:  # PeftModel, `_prepare_model_for_gradient_checkpointing`
                module.enable_input_require_grads()  # type: ignore[operator]
        except ValueError as error:
            raise UsageError(f"{loaded.name} does not support gradient checkpointing", where=str(error)) from error
        return
    if not loaded.layers:
        raise UsageError(
            f"--checkpoint full: no list of layers found in {loaded.name}",
            where=loaded.source,
            hint="layers must be in an nn.ModuleList",
        )
    by_name = dict(module.named_modules())
    for path in loaded.layers:
        layer = by_name.get(path) or by_name[f"base_model.model.{path}"]
        layer.forward = _checkpointed(layer.forward)


def _is_reentrant(module: nn.Module) -> bool:
    """Whether transformers has set its checkpointing to reentrant (`PreTrainedModel.gradient_checkpointing_enable`)."""
    functions = (getattr(m, "_gradient_checkpointing_func", None) for m in module.modules())
    return any(getattr(f, "keywords", {}).get("use_reentrant", False) for f in functions)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _switch_dropout_off(module: nn.Module) -> None:
    """Sets every dropout probability to 0: modules, and the float attributes and config fields named after dropout."""
    for submodule in module.modules():
        if isinstance(submodule, nn.modules.dropout._DropoutNd):
            submodule.p = 0.0
        for holder in (submodule, getattr(submodule, "config", None)):
            for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else []:
                if isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
                    setattr(holder, name, 0.0)


def without_effect(loaded: LoadedModel, recipe: Recipe) -> list[str]:
    """Options of the recipe that change nothing for this model, each in a sentence for the report."""
    said = []
    if recipe.batch_kind == "padded" and loaded.call.mask is None:
        said.append("batch-kind padded has no effect: forward() takes no attention mask")
    if recipe.attention in ("eager", "flash-attn-2") and not loaded.is_hf:
        said.append(f"attention {recipe.attention} has no effect: the model's own code computes its attention")
    if recipe.mode == "forward" and (recipe.accumulate > 1 or recipe.clip or recipe.checkpoint != "none"):
        said.append("accumulate, clip and checkpoint have no effect on a forward pass alone")
    if recipe.function and not recipe.keep_outputs:
        said.append("function has no effect: the outputs are dropped before backward")
    if recipe.optimizer == "none" and recipe.optimizer_impl != "default":
        said.append(f"optimizer-impl {recipe.optimizer_impl} has no effect: there is no optimizer")
    return said
