"""bitsandbytes' optimizers, described without the package: the same states, one operator an updated parameter.

Sources, bitsandbytes 0.50.2: optim/optimizer.py, `Optimizer2State.init_state`, `Optimizer1State.init_state`,
`get_state_buffer`; functional.py, `get_paged`, `create_dynamic_map`. A state is fp32, or with 8 bits one byte an element and an
fp32 scale for each 256 (the block size before 0.44 was 2048), whatever the parameter's type. Parameters of fewer than 4096
elements keep fp32 states. The tables of the 8-bit values, 256 fp32 numbers each, are shared by all parameters. A paged state of
at least 100,000 elements lies in CUDA managed memory, which is not the caching allocator's: it is in host memory here, and the
driver moves it to the GPU, as far as there is room, while it is used. Scales are never paged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from memir.errors import UsageError
from memir.updates.bitsandbytes import BLOCK, KERNEL, NUM_STATES, SMALLEST_8BIT, SMALLEST_PAGED, tables
from memir.updates.names import Named


def _operator(name: str) -> Any:
    """An operator that changes parameter and states in place: (gradient, parameter, states, scales and tables)."""

    def update(gradient: torch.Tensor, parameter: torch.Tensor, states: list[torch.Tensor], tables: list[torch.Tensor]) -> None:
        raise RuntimeError("memir's operators describe memory; they are never run")

    update.__annotations__ = {
        "gradient": torch.Tensor,
        "parameter": torch.Tensor,
        "states": list[torch.Tensor],
        "tables": list[torch.Tensor],
        "return": None,
    }
    made = torch.library.custom_op(f"memir_bitsandbytes::{name}", update, mutates_args=("parameter", "states"))
    made.register_fake(lambda gradient, parameter, states, tables: None)
    return made


_UPDATES = {
    (kernel, bits): _operator(f"{kernel}32bit" if bits == 32 else f"{kernel}_8bit_blockwise")
    for kernel in ("adam", "lion", "rmsprop")
    for bits in (8, 32)
}


class Described(torch.optim.Optimizer):
    """Stands for bitsandbytes' optimizer on fake parameters.

    `wide` are ids of parameters whose states keep 32 bits; `on_cuda` says whether the target has managed memory.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], named: Named, wide: Collection[int], on_cuda: bool) -> None:
        super().__init__(list(parameters), {})
        self.named, self.wide, self.on_cuda = named, wide, on_cuda
        self.shared = {name: torch.empty(256) for name in tables(named, on_cuda)}  # tensors of the optimizer itself

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is called
        """One update of every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            if not self.state[parameter]:
                self._init(parameter)
            state = self.state[parameter]
            states = [state[f"state{i + 1}"] for i in range(NUM_STATES[self.named.cls])]
            bits = 8 if states[0].dtype == torch.uint8 else 32
            scales = [state[f"absmax{i + 1}"] for i in range(len(states))] if bits == 8 else []
            shared = list(self.shared.values())[: len(states)] if bits == 8 else []
            parameter.grad = parameter.grad.contiguous()
            update = _UPDATES[KERNEL[self.named.cls], bits]
            update(parameter.grad, parameter, states + scales, shared)

    def _init(self, parameter: torch.Tensor) -> None:
        count = parameter.numel()
        narrow = self.named.bits == 8 and count >= SMALLEST_8BIT and id(parameter) not in self.wide
        for i in range(NUM_STATES[self.named.cls]):
            state = torch.zeros_like(parameter, dtype=torch.uint8 if narrow else torch.float32)
            if self.named.paged and self.on_cuda and count >= SMALLEST_PAGED:
                setattr(state, "is_paged", True)  # noqa: B010 (the attribute that bitsandbytes gives it)
            self.state[parameter][f"state{i + 1}"] = state
            if narrow:
                self.state[parameter][f"absmax{i + 1}"] = torch.zeros(-(-count // BLOCK))


def real(parameters: Iterable[torch.Tensor], named: Named, embeddings: Iterable[torch.nn.Embedding]) -> torch.optim.Optimizer:
    """bitsandbytes' own optimizer, for a step that is really run; embeddings that are given keep 32-bit states."""
    try:
        import bitsandbytes
    except ImportError:
        raise UsageError("running this optimizer for real needs bitsandbytes", hint="pip install bitsandbytes") from None
    options = {"optim_bits": named.bits, **({} if named.cls == "RMSprop" else {"is_paged": named.paged})}
    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, named.cls)(list(parameters), lr=1e-3, **options)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for embedding in embeddings:
        manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    return made
