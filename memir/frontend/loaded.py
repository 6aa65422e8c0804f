"""What loading gives to tracing: a module on the meta device and how its caller calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Call:
    """How the loop calls the model and where the loss is.

    `ids`, `targets` and `mask` are names of parameters of `forward` (None: not passed). `constants` are passed as they are.
    `loss` says where the loss is found:
    - "return": forward returns it (a scalar tensor)
    - "item:1": the returned tuple or list has it at that place ("item:loss" for a dict's key)
    - "attr:loss": an attribute of the returned object
    - "module:last_loss": an attribute of the module after forward
    - "logits:return", "logits:item:0", "logits:attr:logits": only logits come back; the loop adds
      F.cross_entropy over the shifted logits in their own dtype, and says so.
    """

    ids: str
    targets: str | None
    mask: str | None = None
    constants: tuple[tuple[str, Any], ...] = ()
    loss: str = "attr:loss"


@dataclass(slots=True)
class LoadedModel:
    """A model on the meta device, in the recipe's dtype, in training mode, unmodified otherwise (no LoRA yet)."""

    module: nn.Module
    call: Call
    name: str  # class name, or the preset's
    target: str  # as the user typed it
    source: str  # "model.py:118" of the class
    config: dict[str, Any] = field(default_factory=dict)  # plain values, for the report
    max_seq: int | None = None  # the longest sequence the model accepts, if known
    layers: tuple[str, ...] = ()  # module paths of the decoder layers, in order
    is_hf: bool = False  # a transformers PreTrainedModel
    roots: tuple[str, ...] = ()  # directories or files whose code is "the user's" (for source lines)
    assumptions: list[str] = field(default_factory=list)  # what was guessed, for the report

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    @property
    def is_library(self) -> bool:
        """Whether its code is that of the installed transformers, and none of the user's runs."""
        return type(self.module).__module__.startswith("transformers.models.")
