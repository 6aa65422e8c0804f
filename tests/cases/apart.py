"""A decoder in one file as people write it: projections apart, an untied head, a loss over `logits.view(-1, V)`."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab_size: int = 1000
    width: int = 64
    heads: int = 4
    depth: int = 3


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_size = config.width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.width, config.width) for _ in range(4))
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x):
        B, S, _ = x.shape  # noqa: N806
        y = self.norm1(x)
        q, k, v = (w(y).view(B, S, -1, self.head_size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).reshape(B, S, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Apart(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
