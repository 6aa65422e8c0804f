"""The optimizer as PyTorch would build it on the recipe's target."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from memir.cuda.optimizers import default_form, forms
from memir.errors import UsageError
from memir.frontend import trainer
from memir.recipe import Recipe


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
    """Which implementation of the optimizer runs: foreach, fused or for-loop (`memir.cuda.optimizers`); "none" without one.

    UsageError where the class does not have the one that the recipe asks for.
    """
    if recipe.optimizer == "none":
        return "none"
    cls = optimizer_class(recipe.optimizer)
    options = inspect.signature(cls).parameters
    if recipe.optimizer_impl == "default":
        trainers = trainer.form_of(recipe.optimizer) if recipe.loop == "trainer" else ""
        return trainers or default_form(cls.__name__, options, recipe.target)
    if recipe.optimizer_impl not in forms(options):
        raise UsageError(f"--optimizer-impl: torch.optim.{cls.__name__} has no {recipe.optimizer_impl} form")
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
        trained = [p for p in module.parameters() if p.requires_grad]
        return cls(trainer.groups(module) if recipe.loop == "trainer" else trained, **options)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UsageError(f"--optimizer: torch.optim.{cls.__name__} cannot be built: {error}") from error
