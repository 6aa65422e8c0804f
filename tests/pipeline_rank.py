"""One rank of tests/oracle/test_pipeline.py: `pipeline_rank.py RANK FOLDER`. PyTorch's own pipeline schedule, measured.

A stage is the user's model with the other stages' modules taken out, as torchtitan and PyTorch's tutorial make them by hand.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel

from memir.recipe import Recipe
from memir.runtime.collectives import BACKEND, register_backend
from memir.runtime.measure import Measured, measure_cpu
from memir.runtime.real import RealStep, load_real

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Case:
    """A model, how it is cut, and what is run."""

    target: str
    sets: dict[str, str]
    cuts: tuple[int, ...]  # the first layer of each stage but the first
    schedule: str
    degree: int = 2
    microbatches: int = 4
    batch: int = 2  # sequences of a micro-batch
    seq: int = 64
    outputs: bool = True
    recipe: dict[str, Any] = field(default_factory=dict)
    copies: int = 1  # of each stage, under DistributedDataParallel

    @property
    def ranks(self) -> int:
        return self.degree * self.copies

    def full_recipe(self) -> Recipe:
        return Recipe(target="cpu", dtype="f32", **self.recipe)


class Part(nn.Module):
    """A stage: `first` before its layers, `last` after them; `beside` makes what each layer is called with besides."""

    def __init__(self, first: nn.Module | None, layers: nn.ModuleList, last: nn.Module | None, beside: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last, self.beside = first, layers, last, beside

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first(x)
        words = self.beside(x)
        for layer in self.layers:
            x = layer(x, **words)
        return x if self.last is None else self.last(x)


class Positions(nn.Module):
    """Tokens and learned positions, of GPT-2 and examples/gpt.py."""

    def __init__(self, tokens: nn.Module, positions: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        places = self.positions(torch.arange(ids.shape[1]))
        x = x + places
        del places
        return self.dropout(x)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {}


class Tables(nn.Module):
    """examples/llama.py: tables of cosines and sines."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.register_buffer("cos", cos.clone(), persistent=False)
        self.register_buffer("sin", sin.clone(), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"cos": self.cos[: x.shape[1]], "sin": self.sin[: x.shape[1]]}


class Rotary(nn.Module):
    """transformers' Llama."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = copy.deepcopy(rotary)

    def forward(self, x: Tensor) -> dict[str, Any]:
        places = torch.arange(x.shape[1]).unsqueeze(0)
        return {"attention_mask": None, "position_ids": places, "position_embeddings": self.rotary(x, position_ids=places)}


def pieces(model: Any) -> tuple[nn.Module, nn.ModuleList, nn.Module, Callable[[], nn.Module]]:
    """What comes before the layers, the layers, what comes after, and what each stage makes for itself."""
    if hasattr(model, "transformer"):
        inner = model.transformer
        first = Positions(inner.wte, inner.wpe, inner.drop)
        return first, inner.h, nn.Sequential(inner.ln_f, copy.deepcopy(model.lm_head)), Nothing
    if hasattr(model, "lm_head"):
        inner = model.model
        return inner.embed_tokens, inner.layers, nn.Sequential(inner.norm, model.lm_head), lambda: Rotary(inner.rotary_emb)
    last = nn.Sequential(model.norm, copy.deepcopy(model.head))
    if hasattr(model, "positions"):
        return Positions(model.tokens, model.positions, model.dropout), model.layers, last, Nothing
    return model.tokens, model.layers, last, lambda: Tables(model.cos, model.sin)


def loss_of(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss that memir's loop computes for the whole model."""
    if hasattr(model, "loss_function"):
        vocabulary = model.config.vocab_size
        function = model.loss_function
        return lambda logits, targets: function(logits=logits, labels=targets, vocab_size=vocabulary)
    if hasattr(model, "positions"):
        return lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    return lambda logits, targets: F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def groups_of(case: Case, rank: int) -> tuple[Any, Any]:
    """The rank's stages, neighbours in the world, and the ranks that have the same ones. Every rank makes all groups."""
    stages = [dist.new_group(list(range(k * case.degree, (k + 1) * case.degree))) for k in range(case.copies)]
    same = [dist.new_group(list(range(k, case.ranks, case.degree)), backend=BACKEND) for k in range(case.degree)]
    return stages[rank // case.degree], same[rank % case.degree]


def builder(case: Case, rank: int, groups: tuple[Any, Any] | None = None) -> Callable[[], Callable[[], object]]:
    def build() -> Callable[[], object]:
        loaded, model = load_real(RealStep(case.target, case.full_recipe(), case.batch, case.seq, case.sets))
        first, layers, last, beside = pieces(model)
        loss = loss_of(model)
        total = len(case.cuts) + 1
        ends = [0, *case.cuts, len(layers)]
        mine = (rank, total - 1 - rank) if case.schedule == "zbv" else range(rank, total, case.degree)
        parts = [
            Part(first if n == 0 else None, layers[ends[n] : ends[n + 1]], last if n == total - 1 else None, beside())
            for n in mine
        ]
        vocabulary = last[-1].out_features  # type: ignore[index]
        del loaded, model, first, layers, last, beside
        gc.collect()  # other stages' modules are gone, however they refer to each other
        group, same = groups or (None, None)
        modules = [part if same is None else DistributedDataParallel(part, process_group=same) for part in parts]
        stages = [
            PipelineStage(part, n, total, torch.device("cpu"), group=group) for part, n in zip(modules, mine, strict=True)
        ]
        schedule = SCHEDULES[case.schedule]
        several = issubclass(schedule, PipelineScheduleMulti)
        run = schedule(stages if several else stages[0], n_microbatches=case.microbatches, loss_fn=loss)  # type: ignore[operator]
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
        shape = (case.batch * case.microbatches, case.seq)
        ids = (torch.randint(0, vocabulary, shape),) if 0 in mine else ()
        targets = {"target": torch.randint(0, vocabulary, shape)} if total - 1 in mine else {}

        def step() -> None:
            run.step(*ids, return_outputs=case.outputs, **targets)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def main(rank: int, folder: Path) -> None:
    case: Case = pickle.loads((folder / "case").read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=case.ranks)
    register_backend()
    groups = groups_of(case, rank) if case.copies > 1 else None
    measured: Measured = measure_cpu(builder(case, rank % case.degree, groups))
    (folder / f"measured{rank}").write_bytes(pickle.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
