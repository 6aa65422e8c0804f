"""A small plain decoder for the tests of memir.freezing, and batches for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 31, 16


class Layer(nn.Module):
    """A causal mean over the past, an MLP and a dropout: hidden states in, hidden states out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(1, x.shape[1] + 1, device=x.device)[None, :, None]
        return x + self.dropout(self.mlp(self.norm(x.cumsum(1) / positions)))


class Decoder(nn.Module):
    """Registered in an order that says nothing: the last norm and the head before the embedding."""

    def __init__(self, num_layers: int = 4, dropout: float = 0.0, tied: bool = False, functional_dropout: float = 0.0) -> None:
        super().__init__()
        self.functional_dropout = functional_dropout
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.last_norm = nn.LayerNorm(WIDTH)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(64, WIDTH) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(num_layers))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions[: ids.shape[1]])
        x = F.dropout(x, self.functional_dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last_norm(x))
        if targets is None:
            return logits
        if mask is not None:
            targets = targets.masked_fill(mask == 0, -100)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def decoder(**options: object) -> Decoder:
    """The same random weights every time."""
    torch.manual_seed(0)
    return Decoder(**options)  # type: ignore[arg-type]


def ids(batch: int = 3, seq: int = 7, seed: int = 0) -> Tensor:
    """int64 [B, S]."""
    return torch.randint(0, VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(seed))
