"""A Llama-style decoder in one file: RMSNorm, rotary positions, grouped key-value heads, SwiGLU. Only logits come back.

    memir analyze examples/llama.py -b 1 -s 4096
    memir analyze examples/llama.py:small --set n_layers=4

Letters: B batch, S sequence, D dim, H n_heads, G n_kv_heads, K = D / H, F hidden_dim, V vocab_size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class LlamaConfig:
    """The defaults are the sizes of TinyLlama-1.1B."""

    dim: int = 2048
    n_layers: int = 22
    n_heads: int = 32
    n_kv_heads: int = 4
    hidden_dim: int = 5632
    vocab_size: int = 32000
    max_seq_len: int = 8192
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, computed in float32, and scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


def rotary_tables(head_dim: int, max_seq_len: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, [max_seq_len, K] each (RoFormer, equation 34)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)  # [K / 2]
    angles = torch.outer(torch.arange(max_seq_len).float(), frequencies).repeat(1, 2)  # [max_seq_len, K]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of [B, H, S, K] by the angles of [S, K]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention in which H / G query heads share one key-value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.dim // config.n_heads
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.n_heads, self.head_dim).transpose(1, 2)  # [B, H, S, K]
        k = self.wk(x).view(batch, seq, self.n_kv_heads, self.head_dim).transpose(1, 2)  # [B, G, S, K]
        v = self.wv(x).view(batch, seq, self.n_kv_heads, self.head_dim).transpose(1, 2)  # [B, G, S, K]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        shared = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)  # [B, H, S, K]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, S, K]
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """SwiGLU: one projection, gated by the SiLU of another, projected back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [B, S, F] inside


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each on a normalized input and added to what came in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Token ids to logits over the next token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        cos, sin = rotary_tables(config.dim // config.n_heads, config.max_seq_len, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)  # [max_seq_len, K]
        self.register_buffer("sin", sin, persistent=False)  # [max_seq_len, K]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [B, S]. Returns logits [B, S, V]."""
        seq = tokens.shape[1]
        if seq > self.config.max_seq_len:
            raise ValueError(f"a sequence of {seq} tokens is longer than max_seq_len={self.config.max_seq_len}")
        x = self.tokens(tokens)  # [B, S, D]
        for layer in self.layers:
            x = layer(x, self.cos[:seq], self.sin[:seq])
        return self.head(self.norm(x))  # [B, S, V]


def small(n_layers: int = 2, dim: int = 256) -> Llama:
    """A factory: a narrow model for trying things out."""
    return Llama(LlamaConfig(dim=dim, n_layers=n_layers, n_heads=8, n_kv_heads=4, hidden_dim=3 * dim, vocab_size=1024))
