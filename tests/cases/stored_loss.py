"""In the way of llama2.c: the loss is stored on the module, a list is filled with append, the embedding is tied."""

# ruff: noqa: UP045  (written as such files are)

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ModelArgs:
    dim: int = 32
    n_layers: int = 3
    n_kv_heads: Optional[int] = None
    vocab_size: int = 101
    max_seq_len: int = 48


class Layer(nn.Module):
    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__()
        self.up = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x, cos):
        return x + self.up(x) * cos


class Transformer(nn.Module):
    last_loss: Optional[torch.Tensor]

    def __init__(self, params: ModelArgs):
        super().__init__()
        self.params = params
        self.tok_embeddings = nn.Embedding(params.vocab_size, params.dim)
        self.layers = torch.nn.ModuleList()
        for layer_id in range(params.n_layers):
            self.layers.append(Layer(layer_id, params))
        self.output = nn.Linear(params.dim, params.vocab_size, bias=False)
        self.tok_embeddings.weight = self.output.weight
        self.register_buffer("cos", torch.arange(params.max_seq_len).float().cos()[:, None], persistent=False)
        self.last_loss = None

    def forward(self, tokens: torch.Tensor, targets: Optional[torch.Tensor] = None) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.cos[: tokens.shape[1]])
        logits = self.output(h)
        self.last_loss = None
        if targets is not None:
            self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits
