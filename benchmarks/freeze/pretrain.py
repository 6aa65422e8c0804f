"""A decoder, really pretrained: next tokens of the standard library's sources."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from benchmarks.freeze import text
from benchmarks.freeze.setting import SEQ, SIZES
from examples.llama import Llama, LlamaConfig

STEPS, BATCH, RATE, WARM_UP = 300, 16, 1e-3, 20


def decoder() -> Llama:
    """With random weights, the same every time."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**SIZES, max_seq_len=SEQ))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token, tokens int64 [B, S]."""
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def pretrain(folder: Path, say: Any) -> dict[str, Any]:
    """Trains, and leaves `pretrained.pt` in the folder: weights and the rows to fine-tune and to test on."""
    sources = text.sources()
    made = text.tokenizer(sources)
    corpus = text.rows(made, sources)
    train_texts, test_texts = text.topics()
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    )
    order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(0))
    losses = []
    start, wall = time.process_time(), time.perf_counter()
    for step in range(STEPS):
        batch = corpus[order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]]
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 24:
            say(f"pretraining: step {step + 1} of {STEPS}, loss {sum(losses[-25:]) / 25:.3f}")
    torch.save(
        {"model": model.state_dict(), "train": text.rows(made, train_texts), "test": text.rows(made, test_texts)},
        folder / "pretrained.pt",
    )
    return {
        "steps": STEPS,
        "tokens": STEPS * BATCH * SEQ,
        "vocabulary": made.get_vocab_size(),
        "corpus_tokens": corpus.numel(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": round(losses[0], 4),
        "last_loss": round(sum(losses[-25:]) / 25, 4),
        "cpu_seconds": round(time.process_time() - start, 1),
        "wall_seconds": round(time.perf_counter() - wall, 1),
    }
