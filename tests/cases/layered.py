"""Layers in which tensors are saved in every way, for tests: inputs, results, numbers, by a function with its own backward."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab_size: int = 96
    width: int = 32
    depth: int = 4
    dropout: float = 0.1


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.relu() * 2


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.gate = nn.Linear(config.width, 2 * config.width, bias=False)
        self.up = nn.Linear(config.width, 2 * config.width)
        self.down = nn.Linear(2 * config.width, config.width, bias=False)
        self.scale = nn.Parameter(torch.ones(config.width))
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, mask):
        y = self.norm(x)
        y = Squared.apply(self.up(y)) * torch.sigmoid(self.gate(y))
        return x + self.drop(self.down(y)) * self.scale * mask * 0.5


class Layered(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        mask = (input_ids > 0).unsqueeze(-1).to(self.head.weight.dtype)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return logits, loss
