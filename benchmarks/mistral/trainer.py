"""Mistral as the Hugging Face Trainer calls it under mixed precision: accelerate turns 16-bit outputs into float32.

accelerate/accelerator.py, `prepare_model`: `model.forward` is wrapped in `accelerate.utils.convert_outputs_to_fp32`. Here a
subclass does it, so that the module can be copied.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import AutoConfig, MistralConfig, MistralForCausalLM

from memir.frontend import presets


class TrainerMistral(MistralForCausalLM):  # type: ignore[misc]  # transformers has no types here
    """MistralForCausalLM whose outputs are float32."""

    @functools.wraps(MistralForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return convert_outputs_to_fp32(super().forward)(*args, **kwargs)


def trainer_mistral(preset: str, layers: int | None = None) -> TrainerMistral:
    """The preset's model on the meta device in bf16; without the sliding window, as `rows.NO_WINDOW` says."""
    known = presets.get(preset)
    assert known is not None
    values = dict(known.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert isinstance(config, MistralConfig)
    config.sliding_window = None
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("meta"):
        model = TrainerMistral._from_config(config, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
    assert isinstance(model, TrainerMistral)
    return model
