"""The optimizer as PyTorch would build it on the recipe's target."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from memir.errors import UsageError
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
