"""The training loop that memir describes: one place for the step that is traced and for the step that is really run.

`prepare` turns the module into what is trained (adapters, checkpointing, dropout), `make_optimizer` builds the optimizer as
PyTorch would on the recipe's target, and `Step` runs one optimizer step and announces its phases.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import nn
from torch.utils.checkpoint import checkpoint

from memir.errors import UsageError
from memir.frontend.loaded import Call, LoadedModel
from memir.recipe import Lora, Recipe

Batch = Mapping[str, torch.Tensor]


def prepare(loaded: LoadedModel, recipe: Recipe) -> nn.Module:
    """The module that is trained: adapters injected, checkpointing switched on, dropout set. Works on meta and real modules."""
    module = loaded.module
    if recipe.lora is not None:
        module = _inject_lora(module, recipe.lora)
    if recipe.mode == "train" and not any(p.requires_grad for p in module.parameters()):
        raise UsageError(
            f"{loaded.name} has no trainable parameter: there is no training step to analyze",
            where=loaded.source,
            hint="set requires_grad on some parameters, or use  --mode forward",
        )
    if recipe.checkpoint == "full":
        _checkpoint_layers(module, loaded)
    if not recipe.dropout:
        _switch_dropout_off(module)
    return module.train()


def _inject_lora(module: nn.Module, lora: Lora) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    if lora.targets:
        options["target_modules"] = list(lora.targets)
    kinds = ("Linear", "Conv1D")  # what PEFT can adapt; GPT-2's linear layers are transformers' Conv1D
    linear = sorted({name.rpartition(".")[2] for name, m in module.named_modules() if type(m).__name__ in kinds})
    known = f"linear modules of this model: {', '.join(linear)}"
    try:
        with warnings.catch_warnings():  # PEFT warns about what it cannot know of meta tensors
            warnings.simplefilter("ignore")
            adapted: nn.Module = get_peft_model(module, LoraConfig(**options))
    except (ValueError, AttributeError) as error:
        if not lora.targets:
            raise UsageError(
                "PEFT has no default LoRA targets for this model",
                hint=f"name them:  --lora r={lora.r},targets=NAME,...\n{known}",
            ) from error
        raise UsageError(f"LoRA targets match nothing: {', '.join(lora.targets)}", hint=known) from error
    return adapted


def _checkpoint_layers(module: nn.Module, loaded: LoadedModel) -> None:
    """`torch.utils.checkpoint` (use_reentrant=False) around every layer; Hugging Face models do it by their own switch."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if loaded.is_hf and enable is not None:
        try:
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The torch.optim class of that name, whatever its case; UsageError with the nearest names."""
    classes = {
        n.lower(): c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }
    classes.pop("optimizer", None)
    found = classes.get(name.lower())
    if found is None or name.lower() == "lbfgs":
        reason = (
            "needs a closure that runs the model several times" if found is not None else "is not an optimizer of torch.optim"
        )
        raise UsageError(f"--optimizer: {name} {reason}", hint=f"known: none, {', '.join(sorted(set(classes) - {'lbfgs'}))}")
    return found


def resolved_impl(recipe: Recipe) -> str:
    """Which implementation of the optimizer runs: foreach, fused or for-loop.

    Source: torch/optim/optimizer.py, `_default_to_fused_or_foreach`: foreach when every parameter is on a CUDA device, else the
    for-loop; torch/optim/_adafactor.py keeps the for-loop for Adafactor; classes without a `foreach` option have one form.
    """
    if recipe.optimizer == "none":
        return "none"
    options = inspect.signature(optimizer_class(recipe.optimizer)).parameters
    if recipe.optimizer_impl == "default":
        foreach = recipe.target == "cuda" and "foreach" in options and recipe.optimizer.lower() != "adafactor"
        return "foreach" if foreach else "for-loop"
    option = {"foreach": "foreach", "fused": "fused"}.get(recipe.optimizer_impl)
    if option is not None and option not in options:
        raise UsageError(f"--optimizer-impl: torch.optim.{optimizer_class(recipe.optimizer).__name__} has no {option} form")
    return recipe.optimizer_impl


def make_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer | None:
    """The optimizer over the trainable parameters, or None for `none` and for `mode=forward`."""
    if recipe.optimizer == "none" or recipe.mode == "forward":
        return None
    cls = optimizer_class(recipe.optimizer)
    impl = resolved_impl(recipe)
    accepted = inspect.signature(cls).parameters
    options: dict[str, Any] = {}
    if "foreach" in accepted:
        options["foreach"] = impl == "foreach"
    if impl == "fused":
        options = {"fused": True}
    if "lr" in accepted and accepted["lr"].default is inspect.Parameter.empty:
        options["lr"] = 1e-3
    try:
        return cls([p for p in module.parameters() if p.requires_grad], **options)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UsageError(f"--optimizer: torch.optim.{cls.__name__} cannot be built: {error}") from error


def without_effect(loaded: LoadedModel, recipe: Recipe) -> list[str]:
    """Options of the recipe that change nothing for this model, each in a sentence for the report."""
    said = []
    if recipe.batch_kind == "padded" and loaded.call.mask is None:
        said.append("batch-kind padded has no effect: forward() takes no attention mask")
    if recipe.attention != "sdpa" and not loaded.is_hf:
        said.append(f"attention {recipe.attention} has no effect: the model's own code computes its attention")
    if recipe.mode == "forward" and (recipe.accumulate > 1 or recipe.clip or recipe.checkpoint != "none"):
        said.append("accumulate, clip and checkpoint have no effect on a forward pass alone")
    if recipe.optimizer == "none" and recipe.optimizer_impl != "default":
        said.append(f"optimizer-impl {recipe.optimizer_impl} has no effect: there is no optimizer")
    return said


def batch_spec(call: Call) -> tuple[str, ...]:
    """Names of the int64 tensors of shape [B, S] that the caller holds: ids, targets and the mask, each its own storage."""
    return tuple(name for name in (call.ids, call.targets, call.mask) if name is not None) + (
        ("targets",) if call.targets is None and call.loss.startswith("logits:") else ()
    )


class Step:
    """One optimizer step: forward, loss, backward (per micro-batch), clipping, optimizer, zero_grad.

    Calls `on_phase(name)` at the start of every phase: forward, backward, optimizer; with N > 1 micro-batches micro0.forward,
    micro0.backward, ..., `on_event(name)` before storages die without an operator (zero_grad, drop_outputs, drop_loss), and
    `on_loss(loss)` before backward.
    The batch belongs to the caller and lives across steps.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer | None,
        on_phase: Callable[[str], None] = lambda name: None,
        on_event: Callable[[str], None] = lambda name: None,
        on_loss: Callable[[torch.Tensor], None] = lambda loss: None,
    ) -> None:
        self.module, self.call, self.recipe, self.optimizer = module, call, recipe, optimizer
        self.on_phase, self.on_event, self.on_loss = on_phase, on_event, on_loss
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.outputs: Any = None

    def forward(self, batch: Batch) -> Any:
        """The model's outputs for the batch, called as the recipe says."""
        call = self.call
        kwargs = {name: batch[name] for name in (call.ids, call.targets, call.mask) if name is not None}
        return self.module(**kwargs, **dict(call.constants))

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """The loss in the outputs, or the shifted cross entropy of the logits."""
        where, _, rest = self.call.loss.partition(":")
        if where == "module":
            unwrap = getattr(self.module, "get_base_model", None)
            base = self.module if unwrap is None else unwrap()
            stored: torch.Tensor = getattr(base, rest)
            return stored
        if where == "logits":
            logits = _pick(outputs, rest)
            targets = batch[self.call.targets or "targets"]
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return _pick(outputs, self.call.loss)

    def zero_grad(self) -> None:
        """Gradients set to None, as the optimizer's zero_grad(set_to_none=True) does."""
        self.on_event("zero_grad")
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self, batch: Batch) -> None:
        """Runs the step. After it, only what a real loop still holds is alive."""
        if self.recipe.mode == "forward":
            self.on_phase("forward")
            with torch.no_grad():
                outputs = self.forward(batch)
                loss = self.loss(outputs, batch)
            self.on_event("drop_outputs")
            if self.recipe.keep_outputs:
                self.outputs = outputs
            del outputs, loss
            return
        count = self.recipe.accumulate
        for micro in range(count):
            prefix = f"micro{micro}." if count > 1 else ""
            self.on_phase(f"{prefix}forward")
            if micro == 0 and self.recipe.zero_grad == "first":
                self.zero_grad()
            outputs = self.forward(batch)
            loss = self.loss(outputs, batch)
            self.on_event("drop_outputs")
            if self.recipe.keep_outputs:
                self.outputs = outputs
            del outputs
            if count > 1:
                loss = loss / count
            self.on_loss(loss)
            self.on_phase(f"{prefix}backward")
            torch.autograd.backward(loss)
            self.on_event("drop_loss")
            del loss
        self.on_phase("optimizer")
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, foreach=self.recipe.target == "cuda")
        if self.optimizer is not None:
            self.optimizer.step()
        if self.recipe.zero_grad == "last":
            self.zero_grad()


def _pick(outputs: Any, where: str) -> torch.Tensor:
    kind, _, key = where.partition(":")
    if kind == "return":
        picked = outputs
    elif kind == "item":
        picked = outputs[int(key)] if key.lstrip("-").isdigit() else outputs[key]
    elif kind == "attr":
        picked = getattr(outputs, key)
    else:
        raise ValueError(f"unknown place of the loss: {where}")
    if not isinstance(picked, torch.Tensor):
        raise UsageError(f"the model returned no tensor at {where!r}", hint="say where it is with  --inputs loss=...")
    return picked


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of the libraries below, also those that they log, are not the user's concern while a step is described."""
    disabled = logging.root.manager.disable  # not a logger's level: transformers sets its own when it is first imported
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
