"""A GPT in one file: learned positions, pre-norm layers, tied embedding and head. Shapes are in the comments.

    memir analyze examples/gpt.py -b 12 -s 1024
    memir analyze examples/gpt.py --set n_layer=24 --set n_embd=1024 --set n_head=16

Letters: B batch, S sequence, D n_embd, H n_head, K = D / H, V vocab_size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GPTConfig:
    """The defaults are GPT-2's smallest model, with the vocabulary padded to a multiple of 64."""

    block_size: int = 1024  # the longest sequence
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in the linear layers and the norms


class Attention(nn.Module):
    """Causal self-attention: every position looks at itself and at those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not a multiple of n_head={config.n_head}")
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.proj_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)  # [B, S, D] each
        q, k, v = (t.view(batch, seq, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))  # [B, H, S, K]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # [B, H, S, K]
        y = y.transpose(1, 2).reshape(batch, seq, width)  # [B, S, D]
        return self.proj_dropout(self.proj(y))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        return self.dropout(self.down(F.gelu(self.up(x))))  # [B, S, 4D] inside


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each on a normalized input and added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Token ids to logits over the next token, and the loss when the targets are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight  # one matrix reads tokens and writes them
        self.apply(self._init)
        for name, parameter in self.named_parameters():  # residual branches start smaller: GPT-2, section 2.3
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.n_layer) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """ids and targets: int64 [B, S], targets already shifted by one. Returns logits [B, S, V] and the mean loss."""
        seq = ids.shape[1]
        if seq > self.config.block_size:
            raise ValueError(f"a sequence of {seq} tokens is longer than block_size={self.config.block_size}")
        positions = torch.arange(seq, device=ids.device)  # [S]
        x = self.dropout(self.tokens(ids) + self.positions(positions))  # [B, S, D]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # [B, S, V]
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss
