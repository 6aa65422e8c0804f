"""What a built module says about itself: its decoder layers, and the longest sequence it accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

# How configurations call the longest sequence: Hugging Face, GPT-2, nanoGPT, Meta's Llama, lit-gpt, torchtitan, MosaicML.
SEQ_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "block_size",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_len",
    "seq_length",
    "context_length",
    "context_size",
    "max_len",
    "max_length",
    "max_context_length",
)
_POSITION = re.compile(r"wpe|pos(?!t)")
_NOT_TEXT = re.compile(r"vision|visual|image|audio")
_NOT_TEXT_POSITION = re.compile(r"rel|vision|visual|image|audio|patch|row|col")


def _is_list(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential) or isinstance(module, nn.ModuleList)


def _topmost_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every list of composite modules that lies in no other such list, in the model's own order."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if _is_list(child) and any(next(element.children(), None) is not None for element in child.children()):
            yield child_path, child
        else:
            yield from _topmost_lists(child, child_path)


def decoder_layers(module: nn.Module) -> tuple[str, ...]:
    """Module paths of the decoder layers, in order: `("model.layers.0", ...)`; empty when there is no list of layers.

    The layers are the ModuleList (or Sequential) that holds most parameters among those that lie in no other one: lists of
    experts or of attention heads lie inside a layer. Elements need children of their own, so a list of projections is none;
    a vision or audio tower does not count.
    """
    best: tuple[int, int, tuple[str, ...]] = (0, 0, ())
    lists = list(_topmost_lists(module))
    for path, layers in [item for item in lists if not _NOT_TEXT.search(item[0])] or lists:
        names = tuple(
            f"{path}.{name}" for name, element in layers.named_children() if next(element.parameters(), None) is not None
        )
        numel = sum(p.numel() for p in layers.parameters())
        if (numel, len(names)) > best[:2]:
            best = (numel, len(names), names)
    return best[2]


def position_limit(module: nn.Module) -> int | None:
    """The longest sequence that learned position embeddings allow; None when there are none.

    `offset` rows in front are not positions (transformers: OPTLearnedPositionalEmbedding and Bart's, 2 rows); RoBERTa-style
    tables start after `padding_idx` (transformers: create_position_ids_from_input_ids).
    """
    limits = []
    for path, child in module.named_modules():
        if isinstance(child, nn.Embedding) and _POSITION.search(path) and not _NOT_TEXT_POSITION.search(path):
            skipped = getattr(child, "offset", None)
            if not isinstance(skipped, int):
                skipped = 0 if child.padding_idx is None else child.padding_idx + 1
            limits.append(child.num_embeddings - skipped)
    return min(limits, default=None)


def mask_limit(module: nn.Module, stated: int) -> int | None:
    """`stated` when the module keeps a table of `stated` positions (a causal mask, sin and cos) in any form, else None."""
    tensors = [*module.buffers(), *(v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor))]
    return stated if any(stated in tensor.shape[-2:] for tensor in tensors if tensor.dim() >= 2) else None


def stated_limit(config: Mapping[str, Any]) -> int | None:
    """What a configuration states as its longest sequence, under any of the usual names; None when it does not."""
    for name in SEQ_NAMES:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
