"""In the way of Meta's Llama: complex rotary factors as a plain attribute, a cache on the GPU, start_pos, inference_mode."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class ModelArgs:
    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    vocab_size: int = -1
    max_batch_size: int = 4
    max_seq_len: int = 32


def precompute_freqs_cis(dim, end):
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2).float() / dim))
    freqs = torch.outer(torch.arange(end), freqs).float()
    return torch.polar(torch.ones_like(freqs), freqs)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_heads = args.n_heads
        self.wqkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.cache_k = torch.zeros((args.max_batch_size, args.max_seq_len, args.dim)).cuda()

    def forward(self, x, start_pos, freqs_cis, mask):
        batch, seq, _ = x.shape
        q, k, v = (t.view(batch, seq, self.n_heads, -1) for t in self.wqkv(x).chunk(3, dim=-1))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * freqs_cis[:, None])
            .flatten(3)
            .type_as(x)
            for t in (q, k)
        )
        self.cache_k[:batch, start_pos : start_pos + seq] = k.detach().flatten(2).to(self.cache_k)
        scores = q.transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3)
        if mask is not None:
            scores = scores + mask
        return (scores.float().softmax(-1).type_as(q) @ v.transpose(1, 2)).transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    def __init__(self, params: ModelArgs):
        super().__init__()
        self.params = params
        self.tok_embeddings = nn.Embedding(params.vocab_size, params.dim)
        self.layers = nn.ModuleList(Attention(params) for _ in range(params.n_layers))
        self.output = nn.Linear(params.dim, params.vocab_size, bias=False)
        self.freqs_cis = precompute_freqs_cis(params.dim // params.n_heads, params.max_seq_len * 2)

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, start_pos: int):
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        self.freqs_cis = self.freqs_cis.to(h.device)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device).triu(diagonal=1).type_as(h)
        for layer in self.layers:
            h = h + layer(h, start_pos, freqs_cis, mask)
        return self.output(h).float()


def model():
    return Transformer(ModelArgs(vocab_size=64))
