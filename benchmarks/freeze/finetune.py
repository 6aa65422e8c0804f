"""Full fine-tuning beside AutoFreeze with a cache on disk: epochs in turn in one process, over several seeds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.freeze.pretrain import decoder, loss_of
from benchmarks.freeze.setting import SEQ
from memir.freezing import ActivationCache, AutoFreeze

SEEDS = (0, 1, 2)
SAMPLES, TEST_SAMPLES, BATCH, EPOCHS, RATE = 160, 128, 4, 4, 3e-4
INTERVALS = 16  # tests over the whole training


@dataclass(slots=True)
class Run:
    """One fine-tuning and what it has taken so far."""

    model: Any
    optimizer: torch.optim.Optimizer
    freezer: AutoFreeze | None
    cpu: list[float] = field(default_factory=list)  # seconds of each epoch
    wall: list[float] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # at each epoch's end

    def epoch(self, batches: list[Tensor]) -> None:
        """One epoch, timed."""
        cpu, wall = time.process_time(), time.perf_counter()
        self.model.train()
        given = [(batch,) for batch in batches]
        for (batch,) in given if self.freezer is None else self.freezer.batches(given):
            loss_of(self.model, batch).backward()
            if self.freezer is not None:
                self.freezer.step()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        self.cuts.append(self.freezer.cut if self.freezer else 0)


@torch.no_grad()
def accuracy(model: Any, rows: Tensor) -> tuple[float, float]:
    """The part of next tokens that are the likeliest by the model, and the mean loss."""
    model.eval()
    right, loss = 0, 0.0
    for batch in rows.split(16):
        logits = model(batch)[:, :-1]
        right += int((logits.argmax(-1) == batch[:, 1:]).sum())
        loss += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())) * len(batch)
    return right / (len(rows) * (SEQ - 1)), loss / len(rows)


def finetune(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Every seed draws its own samples, order and test rows; both ways start from the same weights."""
    saved = torch.load(folder / "pretrained.pt", weights_only=True)
    return {
        "samples": SAMPLES,
        "batch": BATCH,
        "seq": SEQ,
        "epochs": EPOCHS,
        "intervals": INTERVALS,
        "threads": torch.get_num_threads(),
        "seeds": {str(seed): _one(saved, seed, folder / f"activations-{seed}", say) for seed in SEEDS},
    }


def _one(saved: dict[str, Any], seed: int, activations: Path, say: Callable[[str], None]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    train = saved["train"][torch.randperm(len(saved["train"]), generator=draw)[:SAMPLES]]
    test = saved["test"][torch.randperm(len(saved["test"]), generator=draw)[:TEST_SAMPLES]]
    shutil.rmtree(activations, ignore_errors=True)
    cache = ActivationCache(activations)
    runs = {"full": _run(saved, None), "autofreeze": _run(saved, cache)}
    before = accuracy(runs["full"].model, test)
    for epoch in range(EPOCHS):
        batches = list(train[torch.randperm(SAMPLES, generator=draw)].split(BATCH))
        for run in runs.values():
            run.epoch(batches)
        say(f"fine-tuning: seed {seed}, epoch {epoch + 1} of {EPOCHS}, cut {runs['autofreeze'].cuts[-1]}")
    cache.flush()
    answer: dict[str, Any] = {"before": _score(before)}
    for name, run in runs.items():
        answer[name] = {
            **_score(accuracy(run.model, test)),
            "cpu_seconds": [round(s, 3) for s in run.cpu],
            "wall_seconds": [round(s, 3) for s in run.wall],
            "cuts": run.cuts,
        }
    freezer = runs["autofreeze"].freezer
    assert freezer is not None
    answer["autofreeze"] |= {
        "events": [f"step {event.step}: {event.why}" for event in freezer.events if event.cut > event.old],
        "cache": {
            "problem": cache.problem,
            "hits": cache.hits,
            "misses": cache.misses,
            "ahead": cache.ahead,
            "nbytes": cache.nbytes,
        },
    }
    cache.close()
    shutil.rmtree(activations)
    return answer


def _run(saved: dict[str, Any], cache: ActivationCache | None) -> Run:
    model = decoder()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    interval = EPOCHS * SAMPLES // BATCH // INTERVALS
    return Run(model, optimizer, AutoFreeze(model, interval=interval, optimizer=optimizer, cache=cache) if cache else None)


def _score(found: tuple[float, float]) -> dict[str, float]:
    return {"accuracy": round(found[0], 5), "loss": round(found[1], 4)}
