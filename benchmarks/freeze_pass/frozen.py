"""The oracle: a module frozen as a fine-tuning script does it, by its modules, without anything of memir's.

What is frozen has requires_grad=False, and the leading part runs under torch.no_grad(), as AutoFreeze runs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_BEFORE = r"(^|\.)(word_embeddings_layernorm|embeddings_layernorm|project_in)$"  # of bloom, of opt


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The decoder's layers: of all module lists the one with the most parameters."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


def freeze_cut(module: nn.Module, cut: int, *, embeddings: bool = True, head: bool = False) -> None:
    """The first `cut` layers are not trained and run under no_grad, with `embeddings` what runs before them too.

    A table that the head shares stays trainable. `head`: what has parameters outside of layers and embeddings is not trained.
    """
    layers = layers_of(module)
    within = {id(p) for layer in layers for p in layer.parameters()}
    before = [m for name, m in module.named_modules() if isinstance(m, nn.Embedding) or re.search(_BEFORE, name)]
    before = [m for m in before if not any(id(p) in within for p in m.parameters())]
    early = {id(p) for m in before for p in m.parameters()}
    linear = [m for m in module.modules() if isinstance(m, nn.Linear) and m not in before]
    shared = {id(p) for m in linear for p in m.parameters()} & early
    if head:
        for p in module.parameters():
            if id(p) not in within | (early - shared):
                p.requires_grad_(False)
    if not cut:
        return
    if hasattr(module, "disable_input_require_grads"):  # gradient_checkpointing_enable() has switched it on
        module.disable_input_require_grads()
    for part in [*(before if embeddings else []), *layers[:cut]]:
        for p in part.parameters():
            if id(p) not in shared:
                p.requires_grad_(False)
    if embeddings:
        for part in [*before, *layers[:cut]]:
            part.forward = _without_grad(part.forward)


def freeze_pattern(module: nn.Module, pattern: str) -> None:
    """Parameters whose name has a match of `pattern` have requires_grad=False; nothing runs under no_grad."""
    for name, p in module.named_parameters():
        if re.search(pattern, name):
            p.requires_grad_(False)


def _without_grad(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return forward(*args, **kwargs)

    return run
