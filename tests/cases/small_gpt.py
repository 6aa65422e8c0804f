"""A small GPT in one file, for tests: two layers, attention, targets optional."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab_size: int = 64
    width: int = 32
    heads: int = 4
    depth: int = 2
    block_size: int = 64
    dropout: float = 0.1


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x):
        B, S, W = x.shape  # noqa: N806
        q, k, v = self.qkv(self.norm(x)).view(B, S, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(B, S, W)
        return x + self.drop(self.down(F.gelu(self.up(x))))


class SmallGPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.block_size, config.width)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.depth)])
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids, targets=None):
        assert ids.shape[1] <= self.config.block_size, "the sequence is longer than block_size"
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
