"""The optimizer as PyTorch, bitsandbytes or transformers would build it on the recipe's target."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memir.cuda.optimizers import default_form, forms
from memir.errors import UsageError
from memir.frontend import optimizers_bnb, trainer
from memir.recipe import Recipe
from memir.updates.bitsandbytes import SMALLEST_PAGED
from memir.updates.names import BITSANDBYTES, NAMES, TORCH, TRANSFORMERS, Named, named


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The torch.optim class of that name, whatever its case; UsageError with the names that there are."""
    classes = {
        n.lower(): c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }
    classes.pop("optimizer", None)
    found = classes.get(name.lower())
    if found is None or name.lower() == "lbfgs":
        reason = "needs a closure that runs the model several times" if found is not None else "is no optimizer that is known"
        raise UsageError(
            f"--optimizer: {name} {reason}",
            hint=f"known: none, {', '.join(sorted(set(classes) - {'lbfgs'}))};\n{', '.join(NAMES)}",
        )
    return found


def named_optimizer(recipe: Recipe) -> Named:
    """What the recipe's optimizer is; UsageError for an unknown name. Not for "none".

    transformers' optimizers are imported here, before anything is traced: their module imports other packages.
    """
    found = named(recipe.optimizer) or Named(TORCH, optimizer_class(recipe.optimizer).__name__)
    if found.package == TRANSFORMERS:
        importlib.import_module("transformers.optimization")
    return found


def resolved_impl(recipe: Recipe) -> str:
    """Which implementation of the optimizer runs: foreach, fused or for-loop (`memir.cuda.optimizers`); "none" without one.

    UsageError where the class does not have the one that the recipe asks for.
    """
    if recipe.optimizer == "none":
        return "none"
    found = named_optimizer(recipe)
    options: Any = inspect.signature(optimizer_class(found.cls)).parameters if found.package == TORCH else ()
    if recipe.optimizer_impl == "default":
        trainers = trainer.form_of(recipe.optimizer) if recipe.loop == "trainer" and found.package == TORCH else ""
        return found.impl or trainers or default_form(found.cls, options, recipe.target)
    if recipe.optimizer_impl not in forms(options):
        where = "torch.optim" if found.package == TORCH else found.package
        raise UsageError(f"--optimizer-impl: {where}.{found.cls} has no {recipe.optimizer_impl} form")
    return recipe.optimizer_impl


def optimizer_notes(recipe: Recipe) -> list[str]:
    """What the report says of the optimizer: choices that a name makes, bytes that are not the allocator's."""
    if recipe.optimizer == "none" or recipe.mode == "forward":
        return []
    found, said = named_optimizer(recipe), []
    if found.paged and recipe.target == "cuda":
        count = f"{SMALLEST_PAGED:,}"
        said.append(
            f"paged optimizer states (parameters of {count} elements or more) lie in managed memory: counted on the host"
        )
    if found.wide_embeddings:
        said.append(f"optimizer {recipe.optimizer}: embeddings' states stay 32-bit, as Hugging Face's Trainer has it")
    if found.cls == "Muon":
        said.append("optimizer muon: AdamW for embeddings, the head and what is no matrix")
    return said


def make_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer | None:
    """The optimizer over the trainable parameters, or None for `none` and for `mode=forward`.

    On fake parameters bitsandbytes' is described (`memir.frontend.optimizers_bnb`), on real ones it is the package's own.
    """
    if recipe.optimizer == "none" or recipe.mode == "forward":
        return None
    found, impl = named_optimizer(recipe), resolved_impl(recipe)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if found.package == BITSANDBYTES:
        embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)] if found.wide_embeddings else []
        if parameters and not isinstance(parameters[0], FakeTensor):
            return optimizers_bnb.real(parameters, found, embeddings)
        wide = {id(embedding.weight) for embedding in embeddings}
        return optimizers_bnb.Described(parameters, found, wide, recipe.target == "cuda")
    if found.package == TRANSFORMERS:
        return _adafactor(parameters)
    if found.cls == "Muon":
        return _Muon(module, parameters, recipe)
    return _built(found.cls, trainer.groups(module) if recipe.loop == "trainer" else parameters, impl)


def _built(name: str, parameters: list[nn.Parameter] | list[dict[str, Any]], impl: str) -> torch.optim.Optimizer:
    cls = optimizer_class(name)
    accepted = inspect.signature(cls).parameters
    options: dict[str, Any] = {}
    if "foreach" in accepted:
        options["foreach"] = impl == "foreach"
    if impl == "fused":
        options = {"fused": True}
    if "lr" in accepted and accepted["lr"].default is inspect.Parameter.empty:
        options["lr"] = 1e-3
    try:
        return cls(parameters, **options)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UsageError(f"--optimizer: torch.optim.{cls.__name__} cannot be built: {error}") from error


def _adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """transformers/trainer_optimizer.py, `_get_adafactor`: the learning rate is given, nothing is relative."""
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    return made


class _Muon(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of the hidden layers, AdamW for the rest: embeddings, the head, norms, biases.

    Muon takes matrices only, and its documentation names AdamW for all others (torch/optim/_muon.py).
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], recipe: Recipe) -> None:
        super().__init__(parameters, {})
        outside = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if head is None:  # the last module that has parameters of its own
            head = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))][-1]
        outside |= {id(p) for p in head.parameters()}
        matrices = [p for p in parameters if p.ndim == 2 and id(p) not in outside]
        rest = [p for p in parameters if not (p.ndim == 2 and id(p) not in outside)]
        form = default_form("AdamW", inspect.signature(torch.optim.AdamW).parameters, recipe.target)
        self.parts = [_built("Muon", matrices, "for-loop")] if matrices else []
        self.parts += [_built("AdamW", rest, form)] if rest else []
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is called
        """One update of both parts."""
        for part in self.parts:
            part.step()
