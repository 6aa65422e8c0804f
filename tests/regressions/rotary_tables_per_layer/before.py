"""A small Llama: rotary positions, grouped keys and values, SwiGLU, RMS norm."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, KV_HEADS, DEPTH, HIDDEN = 512, 64, 4, 2, 3, 192
HEAD = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x * scale)


def rotary_table(limit):
    angles = torch.outer(torch.arange(limit).float(), 10000 ** (-torch.arange(0, HEAD, 2).float() / HEAD))
    return torch.cat((angles, angles), dim=-1)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, seq, width = x.shape
        q = self.q(x).view(batch, seq, HEADS, HEAD).transpose(1, 2)
        k = self.k(x).view(batch, seq, KV_HEADS, HEAD).transpose(1, 2)
        v = self.v(x).view(batch, seq, KV_HEADS, HEAD).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        k = k[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).reshape(batch, HEADS, seq, HEAD)
        v = v[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).reshape(batch, HEADS, seq, HEAD)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(), RMSNorm()
        self.attention = Attention()
        self.mlp = MLP()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("angles", rotary_table(4096), persistent=False)

    def forward(self, ids, targets):
        seq = ids.shape[1]
        x = self.tokens(ids)
        cos, sin = self.angles[:seq].cos().to(x.dtype), self.angles[:seq].sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))
        return logits, loss
