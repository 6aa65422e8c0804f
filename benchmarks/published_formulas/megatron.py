"""A GPT of Megatron's layer as Korthikanti et al. count it ("Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, section 4), operator by operator, in plain PyTorch.

    memir formula benchmarks/published_formulas/megatron.py --dtype f16 --of layer

`tensor_parallel` above 1 adds sequence parallelism (section 4.2.2): the batch is one rank's share of the tokens, S/t of them,
which are gathered before each pair of linear layers and scattered after it. What a collective moves comes from this rank's own
share: the sizes are those of a real one, the values are not.

With numbers for one of t tensor-parallel ranks: num_attention_heads and intermediate_size are a/t and 4h/t, the rest is whole
(section 4.2.1: f copies, and its conjugate adds in place, so neither keeps anything).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
    tensor_parallel: int = 1


class GatheredLinear(torch.autograd.Function):
    """A linear layer on the gathered tokens that keeps the share, and gathers again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, degree: int) -> Tensor:  # type: ignore[override]
        """[S/t, B, h] to [S, B, out]."""
        ctx.save_for_backward(x, weight)
        ctx.degree = degree
        return F.linear(x.repeat(degree, 1, 1), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """The share's gradient, and those of weight and bias."""
        x, weight = ctx.saved_tensors
        whole = x.repeat(ctx.degree, 1, 1).flatten(0, 1)
        flat = grad.flatten(0, 1)
        return (grad @ weight)[: x.shape[0]].clone(), flat.t() @ whole, flat.sum(0), None


class Scatter(torch.autograd.Function):
    """The rank's share of the tokens; in the backward they are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, degree: int) -> Tensor:  # type: ignore[override]
        """[S, B, h] to [S/t, B, h]."""
        ctx.degree = degree
        return x[: x.shape[0] // degree].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """[S/t, B, h] to [S, B, h]."""
        return grad.repeat(ctx.degree, 1, 1), None


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

    def into(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The first linear layer of a pair."""
        degree = self.config.tensor_parallel
        return linear(x) if degree == 1 else GatheredLinear.apply(x, linear.weight, linear.bias, degree)

    def out_of(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The second one."""
        degree = self.config.tensor_parallel
        return linear(x) if degree == 1 else Scatter.apply(linear(x), degree)

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        """[S, B, h] to [S, B, a*d], as Megatron lays tokens out."""
        heads, head = self.config.num_attention_heads, self.config.head_dim
        qkv = self.into(self.qkv, x)
        seq, batch, _ = qkv.shape
        q, k, v = qkv.view(seq, batch * heads, 3 * head).transpose(0, 1).split(head, -1)
        if self.config.recompute == "core":
            out = checkpoint(self.core, q, k, v, mask, use_reentrant=False)
        else:
            out = self.core(q, k, v, mask)
        return out.transpose(0, 1).reshape(seq, batch, heads * head)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[S, B, h] to [S, B, h]."""
        x = x + self.attention_dropout(self.out_of(self.projection, self.attention(self.input_norm(x), mask)))
        hidden = F.gelu(self.into(self.up, self.post_norm(x)), approximate="tanh")
        return x + self.mlp_dropout(self.out_of(self.down, hidden))


class Model(nn.Module):
    """Embeddings, layers, a last norm and the head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.degree = config.tensor_parallel
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
        whole = seq * self.degree
        mask = torch.full((whole, whole), float("-inf"), dtype=x.dtype, device=idx.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x)).transpose(0, 1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
