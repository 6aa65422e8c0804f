"""A model whose own code freezes a prefix, as a fine-tuning script does: the oracle of frozen ranks."""

from __future__ import annotations

from examples.llama import Llama, LlamaConfig


def frozen(cut: int = 2, n_layers: int = 5) -> Llama:
    """A narrow model; the embedding and the first `cut` layers have requires_grad=False."""
    config = LlamaConfig(dim=128, n_layers=n_layers, n_heads=4, n_kv_heads=2, hidden_dim=344, vocab_size=1000)
    model = Llama(config)
    for part in (model.tokens, *model.layers[:cut]):
        part.requires_grad_(False)
    return model
