"""One of two processes of tests/test_freezing_ddp.py: `freezing_ddp.py RANK FOLDER`. Writes what it ended with as JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memir.freezing import ActivationCache, AutoFreeze
from tests.decoders import Decoder, ids

NUM_SAMPLES, EPOCHS = 8, 8


def batches(rank: int, epoch: int) -> list[torch.Tensor]:
    """Two batches of two samples for each rank; every epoch other samples for each."""
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()[rank::2]
    return [torch.cat([ids(1, seed=k) for k in order[at : at + 2]]) for at in (0, 2)]


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(json.dumps([p.tolist() for p in model.parameters()]).encode()).hexdigest()


def with_trainer(folder: Path) -> tuple[DistributedDataParallel, AutoFreeze, ActivationCache | None, list[int]]:
    """The Trainer, which reads rank, world size and the meeting place from the environment."""
    import transformers

    from memir.freezing import FreezingCallback
    from tests.test_freezing_trainer import Samples, arguments, hugging_face

    cache = ActivationCache(folder / "activations")
    callback = FreezingCallback(num_intervals=6, percentile=80, cache=cache)
    trainer = transformers.Trainer(
        model=hugging_face("llama", tie_word_embeddings=False),
        args=arguments(folder / "out", ddp_backend="gloo"),
        train_dataset=Samples(),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.freezer is not None
    return trainer.model_wrapped, callback.freezer, cache, [event.cut for event in callback.freezer.events]


def with_loop(
    rank: int, folder: Path, cached: bool
) -> tuple[DistributedDataParallel, AutoFreeze, ActivationCache | None, list[int]]:
    dist.init_process_group("gloo", init_method=f"file://{folder}-meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    cache = ActivationCache(folder / "activations") if cached else None
    freezer = AutoFreeze(model, interval=3, optimizer=optimizer, cache=cache)
    cuts = []
    for epoch in range(EPOCHS):
        for x in freezer.batches((x, x) for x in batches(rank, epoch)):
            model(*x).backward()
            freezer.step()
            optimizer.step()
            optimizer.zero_grad()
        if cache is not None:
            cache.flush()
            dist.barrier()
        cuts.append(freezer.cut)
    return model, freezer, cache, cuts


def run(rank: int, folder: Path, kind: str) -> dict[str, Any]:
    model, freezer, cache, cuts = with_trainer(folder) if kind == "trainer" else with_loop(rank, folder, kind == "cached")
    ended = {
        "cuts": cuts,
        "num_layers": len(freezer.prefix.layers),
        "digest": digest(model),
        "hits": cache.hits if cache else 0,
        "problem": cache.problem if cache else "",
        "reduced_bytes": model._get_ddp_logging_data()["total_parameter_size_bytes"],  # DDP's own account
        "trained_bytes": sum(4 * p.numel() for p in model.parameters() if p.requires_grad),
    }
    dist.destroy_process_group()
    return ended


def main(rank: int, folder: Path) -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    ended = {kind: run(rank, folder / kind, kind) for kind in ("plain", "cached", "trainer")}
    (folder / f"{rank}.json").write_text(json.dumps(ended), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
