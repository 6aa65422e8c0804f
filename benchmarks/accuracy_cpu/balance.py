"""Mixture of experts with a balanced load by construction: what memir assumes, made true in a real run.

With random weights a router sends tokens where it likes, and what an expert's matrices take depends on it. Here the choices are
overwritten in place, after the router has made them and before the experts see them: the same operators run on the same
sizes, only the numbers are others.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def balance(module: nn.Module) -> None:
    """Every experts module of transformers (its forward takes `top_k_index`) gets its tokens round robin."""
    found = 0
    for submodule in module.modules():
        names = list(inspect.signature(submodule.forward).parameters)
        if "top_k_index" in names:
            submodule.register_forward_pre_hook(
                _round_robin(names.index("top_k_index"), int(submodule.num_experts)), with_kwargs=True
            )
            found += 1
    if not found:
        raise ValueError("no experts module takes top_k_index")


def _round_robin(place: int, num_experts: int) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[place]
        order = torch.arange(chosen.numel(), device=chosen.device).remainder_(num_experts)
        chosen.data.copy_(order.view(chosen.shape))  # .data: autograd has kept the choices and would notice

    return hook
