"""A model with an autograd function of its own, which saves its input and its weight whatever gradient is needed."""

import torch
import torch.nn.functional as F
from torch import nn


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight.t() if ctx.needs_input_grad[0] else None
        of_weight = x.flatten(0, 1).t() @ gradient.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own = nn.Parameter(torch.randn(width, width))
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return self.down(F.relu(Product.apply(2 * torch.sigmoid(x), self.own)))


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(96, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 96, bias=False)

    def forward(self, ids, targets=None):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
