"""Expert parallelism as transformers 5 has it: whole experts on each rank, tokens by all-to-all (`AllToAllEP`).

transformers/distributed/expert_parallel.py, `apply_expert_parallelism` with a configuration's `base_model_ep_plan`: the
experts' stacked weights are cut along their first dimension, and their forward is called with the tokens that other ranks sent.
Every rank has a batch of its own. Where the router's scores send tokens is given: round robin, so that every rank receives as
many as it sends, as memir's traces have it (memir/frontend/replay.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from memir.errors import UsageError
from memir.frontend.parallel.method import Axis, Method, Model


@dataclass(frozen=True, slots=True)
class ExpertParallel(Method):
    """Every rank has 1/degree of the experts of each layer, and all of what is no expert."""

    name: ClassVar[str] = "expert-parallel"
    order: ClassVar[int] = 1

    degree: int = 1

    def axes(self) -> tuple[Axis, ...]:
        """One axis, `expert`, and one of a single rank for the ranks that would share a batch."""
        return (Axis("expert", self.degree), Axis("expert-batch", 1))

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """The module with DTensors for the experts' weights. UsageError: no stacked experts, experts that do not divide."""
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        plan: dict[str, str] = {}
        for path, module in model.module.named_modules():
            if not hasattr(module, "_is_expert_parallel"):
                continue
            experts = int(module.num_experts)
            if experts % self.degree:
                raise UsageError(f"expert-parallel: {experts} experts do not divide by {self.degree}", where=path)
            plan |= {f"{path}.{name}": "grouped_gemm" for name, _ in module.named_parameters(recurse=False)}
            plan[path] = "ep_dispatch_experts"
        if not plan:
            raise UsageError("expert-parallel: the model has no stacked experts of transformers", where=model.loaded.source)
        apply_expert_parallelism(model.module, mesh["expert"], mesh["expert-batch"], plan, "all_to_all")
        return model.module

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """`torch.topk` picks round robin; the scores are as they are."""
        before = torch.topk

        def balanced(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            picked = before(scores, *args, **kwargs)
            picked.indices.data.copy_(_round_robin(tuple(picked.indices.shape), scores.shape[-1]))
            return picked

        torch.topk = balanced  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.topk = before


def _round_robin(shape: tuple[int, ...], experts: int) -> Tensor:
    """0, 1, 2, ... over the experts, in memory that PyTorch's allocator does not see."""
    return torch.from_numpy(np.arange(math.prod(shape)) % experts).view(shape)
