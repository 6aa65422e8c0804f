"""DeepSpeed's ZeRO, stages 1 to 3: `deepspeed.initialize` around the model, its engine's backward and step.

DeepSpeed is not needed by memir. To run this, install it (`pip install deepspeed`); it works on the CPU without compiled
operators. Defaults are those of deepspeed/runtime/zero/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memir.frontend.loop import Step
from memir.frontend.optimizers import make_optimizer
from memir.frontend.parallel.deepspeed import import_deepspeed
from memir.frontend.parallel.method import Axis, Method, Model, RunStep


@dataclass(frozen=True, slots=True)
class Zero(Method):
    """Optimizer states (1), gradients (2) and parameters (3) partitioned over `degree` ranks. Sizes are numbers of elements."""

    name: ClassVar[str] = "zero"
    order: ClassVar[int] = 3

    degree: int = 1
    stage: Literal[1, 2, 3] = 2
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None  # None: true with stage 3
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_param: bool = False
    grad_accum_dtype: str = ""  # data_types.grad_accum_dtype: fp32, fp16, bf16

    def axes(self) -> tuple[Axis, ...]:
        """One axis, `data`."""
        return (Axis("data", self.degree),)

    def apply(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        """The module as it is: the engine is made with the step."""
        return model.module

    def own_step(self, model: Model, mesh: DeviceMesh, batch: Mapping[str, torch.Tensor]) -> RunStep:
        """The step of a script that calls the engine. UsageError where DeepSpeed is not installed."""
        deepspeed = import_deepspeed("zero")
        optimizer = make_optimizer(model.module, model.recipe)
        rows = next(iter(batch.values())).shape[0]
        engine = deepspeed.initialize(
            model=model.module, optimizer=optimizer, config=self._config(model, rows), dist_init_required=False
        )[0]
        step = _EngineStep(engine, model.loaded.call, model.recipe, None)
        return lambda: step(batch)

    def _config(self, model: Model, rows: int) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.reduce_bucket_size,
            "allgather_bucket_size": self.allgather_bucket_size,
            "contiguous_gradients": self.contiguous_gradients,
            "reduce_scatter": self.reduce_scatter,
            "round_robin_gradients": self.round_robin_gradients,
            "sub_group_size": self.sub_group_size,
            "stage3_prefetch_bucket_size": self.prefetch_bucket_size,
            "stage3_param_persistence_threshold": self.param_persistence_threshold,
            "stage3_max_live_parameters": self.max_live_parameters,
            "stage3_max_reuse_distance": self.max_reuse_distance,
        }
        if self.overlap_comm is not None:
            zero["overlap_comm"] = self.overlap_comm
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload_param:
            zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": model.recipe.accumulate,
            "gradient_clipping": model.recipe.clip or 0.0,
            "bf16": {"enabled": model.recipe.dtype == "bf16"},
            "fp16": {"enabled": model.recipe.dtype == "f16", "loss_scale": 1.0},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "data_types": {"grad_accum_dtype": self.grad_accum_dtype or None},
        }


class _EngineStep(Step):
    """The step with the engine's backward and step; DeepSpeed clips and frees gradients itself."""

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        """`engine.backward`, and between micro-batches `engine.step`, which only counts there."""
        engine: Any = self.module
        engine.backward(loss, scale_wrt_gas=False)
        if micro + 1 < self.recipe.accumulate:
            engine.step()

    def update(self) -> None:
        """`engine.step`."""
        engine: Any = self.module
        engine.step()

    def zero_grad(self) -> None:
        """Nothing: the engine does it in its step."""
