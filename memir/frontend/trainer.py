"""What Hugging Face's Trainer does in a step beside calling the model: `--loop trainer`.

The installed transformers is asked where its releases differ. Sources: transformers/trainer.py, `_run_epoch` (before 5.0
`_inner_training_loop`), `training_step`, `compute_loss`, `get_batch_samples`, `create_optimizer`; training_args.py;
accelerate/accelerator.py, `prepare_model`; accelerate/utils/operations.py, `convert_outputs_to_fp32`;
accelerate/data_loader.py, `DataLoaderShard.__iter__`.

- the batch has input_ids, attention_mask and labels; all micro-batches of a step are on the device at once;
- under autocast the 16-bit tensors of the outputs are copied to fp32; outputs are dropped before backward;
- the targets are counted, and the model divides the sum of the losses by their number, if its forward takes that;
- the loss, the sum of losses and the norm of the gradients, scalars, live until the next step;
- gradients are clipped to 1 and freed after the optimizer's step; weights and biases are two groups of parameters.

Not described: fp16's GradScaler, which holds two scalars.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memir.errors import UsageError
from memir.frontend.loaded import LoadedModel
from memir.ir.core import Kind, Program

IGNORED = -100
_NUMBER = "num_items_in_batch"


def check_loss(loaded: LoadedModel) -> None:
    """UsageError where Trainer would not find the loss: it takes `outputs["loss"]`, or the first output (`compute_loss`)."""
    if loaded.call.loss not in ("attr:loss", "item:loss", "item:0"):
        raise UsageError(
            f"--loop trainer: Hugging Face's Trainer takes the loss from the model, and {loaded.name} does not return it first",
            where=f"the loss is at {loaded.call.loss}",
            hint="use  --loop plain",
        )


def takes_number(module: nn.Module) -> bool:
    """Whether the model is told the number of targets (`__init__`, `model_accepts_loss_kwargs`)."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    stated = getattr(base, "accepts_loss_kwargs", None)
    if stated is not None:
        return bool(stated)
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(base.forward).parameters.values())


def number_of_targets(labels: Iterable[torch.Tensor]) -> dict[str, Any]:
    """The argument that tells the model how many targets the micro-batches of a step have; a tensor since transformers 4.51."""
    from transformers.trainer import Trainer

    count: Any = sum((each[..., 1:] != IGNORED).sum() for each in labels)
    tensor = "device" in inspect.signature(Trainer.get_batch_samples).parameters  # before, it was `.item()` of it
    return {_NUMBER: count / 1 if tensor else 1}


def widened(outputs: Any) -> Any:
    """The outputs with 16-bit tensors copied to fp32; what is no list, tuple or mapping stays (a cache of keys and values)."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    if isinstance(outputs, Mapping):
        made: Callable[..., Any] = type(outputs)
        return made({name: widened(value) for name, value in outputs.items()})
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(widened(value) for value in outputs))
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(widened(value) for value in outputs)
    return outputs


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters with weight decay, then those without; an optimizer runs one group after the other."""
    from transformers.trainer import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, module))  # it uses no self
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    made = [[p for name, p in trained if (name in decayed) is decays] for decays in (True, False)]
    return [{"params": parameters} for parameters in made]


def form_of(optimizer: str) -> str:
    """ "fused" where TrainingArguments' default optimizer, an AdamW, is; empty for another one, which PyTorch decides on."""
    from transformers.training_args import TrainingArguments

    default = str(getattr(TrainingArguments, "default_optim", ""))
    return "fused" if optimizer.lower() == "adamw" and default.endswith("_fused") else ""


def sets_cache_off() -> bool:
    """Whether Trainer sets the config's `use_cache` to False (TrainingArguments.use_cache, since 5.0)."""
    from transformers.training_args import TrainingArguments

    return getattr(TrainingArguments, "use_cache", None) is False


def with_all_batches(program: Program, count: int) -> Program:
    """The program with the inputs of all `count` micro-batches, which Trainer fetches before the first one runs."""
    inputs = [storage for storage in program.storages if storage.kind == Kind.INPUT and storage.live_in]
    others = [replace(storage, name=f"{storage.name}_of_other_batches[:{count - 1}]") for storage in inputs]
    return replace(program, storages=(*program.storages, *others)) if count > 1 else program
