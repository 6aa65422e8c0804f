"""In the way of lit-gpt: a configuration by name, and a class method that builds from a name."""

# ruff: noqa: C408  (written as such files are)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SIZES = {"tiny": dict(n_layer=2, n_embd=16), "wide": dict(n_layer=2, n_embd=64)}


@dataclass
class Config:
    name: str = ""
    n_layer: int = 4
    n_embd: int = 32
    padded_vocab_size: int | None = None
    block_size: int = 40

    def __post_init__(self) -> None:
        if self.padded_vocab_size is None:
            self.padded_vocab_size = 128

    @classmethod
    def from_name(cls, name: str, **kwargs: Any) -> Config:
        return cls(name=name, **{**SIZES[name], **kwargs})


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.padded_vocab_size, config.n_embd),
                h=nn.ModuleList(Block(config, i) for i in range(config.n_layer)),
            )
        )
        self.max_seq_length = config.block_size

    @classmethod
    def from_name(cls, name: str, **kwargs: Any) -> GPT:
        return cls(Config.from_name(name, **kwargs))

    def forward(self, idx: torch.Tensor, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(x)


class Block(nn.Module):
    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 2 * config.n_embd), nn.GELU(), nn.Linear(2 * config.n_embd, config.n_embd)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def tiny() -> GPT:
    return GPT.from_name("tiny")


def by_size(n_layer: int, n_embd: int = 16) -> GPT:
    return GPT(Config(n_layer=n_layer, n_embd=n_embd))
