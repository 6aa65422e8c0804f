"""A GPT of Megatron's layer as Korthikanti et al. count it ("Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, section 4), operator by operator, in plain PyTorch.

    memir formula benchmarks/published_formulas/megatron.py --dtype f16 --of layer

With numbers for one of t tensor-parallel ranks: num_attention_heads and intermediate_size are a/t and 4h/t, the rest is whole
(section 4.2.1: f copies, and its conjugate adds in place, so neither keeps anything).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    """The defaults are GPT-2's; `recompute` "core" is the paper's selective recomputation (section 5)."""

    vocab_size: int = 50304
    max_position_embeddings: int = 1024
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_attention_heads: int = 12
    head_dim: int = 64
    num_hidden_layers: int = 12
    dropout: float = 0.1
    recompute: str = "none"


class CoreAttention(nn.Module):
    """softmax(QK^T), its dropout, and attention over V: what selective recomputation does again."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.scale = 1 / math.sqrt(config.head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q, k, v [B*a, S, d], mask [S, S] of 0 and -inf: [B*a, S, d]."""
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self.scale)
        return torch.bmm(self.dropout(torch.softmax(scores, -1)), v)


class Layer(nn.Module):
    """Attention and MLP, each after a layer norm and before dropout and the residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        inner = config.num_attention_heads * config.head_dim
        self.config = config
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * inner)
        self.core = CoreAttention(config)
        self.projection = nn.Linear(inner, config.hidden_size)
        self.post_norm = nn.LayerNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.mlp_dropout = nn.Dropout(config.dropout)

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        """[S, B, h] to [S, B, a*d], as Megatron lays tokens out."""
        seq, batch, _ = x.shape
        heads, head = self.config.num_attention_heads, self.config.head_dim
        q, k, v = self.qkv(x).view(seq, batch * heads, 3 * head).transpose(0, 1).split(head, -1)
        if self.config.recompute == "core":
            out = checkpoint(self.core, q, k, v, mask, use_reentrant=False)
        else:
            out = self.core(q, k, v, mask)
        return out.transpose(0, 1).reshape(seq, batch, heads * head)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[S, B, h] to [S, B, h]."""
        x = x + self.attention_dropout(self.projection(self.attention(self.input_norm(x), mask)))
        return x + self.mlp_dropout(self.down(F.gelu(self.up(self.post_norm(x)), approximate="tanh")))


class Model(nn.Module):
    """Embeddings, layers, a last norm and the head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Token ids [B, S] and the ids to predict [B, S] to the loss."""
        _, seq = idx.shape
        places = torch.arange(seq, device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(places)).transpose(0, 1)
        mask = torch.full((seq, seq), float("-inf"), dtype=x.dtype, device=idx.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x)).transpose(0, 1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
