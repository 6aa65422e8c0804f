"""Who owns the storages that live across steps: parameters, buffers, the batch, gradients, optimizer states, held outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from memir.frontend.fake import tensor_attributes
from memir.frontend.record import Recorder
from memir.ir.core import Kind


class Residents:
    """Names and kinds for the recorder's storages, by owner."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        batch: Mapping[str, torch.Tensor],
        recorder: Recorder,
        host_scalars: bool,
    ) -> None:
        self.module, self.optimizer, self.batch, self.recorder = module, optimizer, batch, recorder
        self.host_scalars = host_scalars  # the optimizer keeps its step counters in host memory
        self.names = {id(p): name.removeprefix("base_model.model.") for name, p in module.named_parameters()}

    def _mark(self, tensor: torch.Tensor, name: str, kind: Kind, of: str | None = None, device: str = "gpu") -> None:
        index, _ = self.recorder.see(tensor)
        record = self.recorder.storages[index]
        if not record.kind:
            record.name, record.kind, record.of, record.device = name, kind, of, device

    def register(self) -> None:
        """Marks everything that is alive between steps now."""
        for name, weight in self.module.named_parameters():
            self._mark(weight, name.removeprefix("base_model.model."), Kind.PARAMETER)
        for name, registered in self.module.named_buffers():
            self._mark(registered, name.removeprefix("base_model.model."), Kind.BUFFER)
        for name, attribute in tensor_attributes(self.module):
            self._mark(attribute, name.removeprefix("base_model.model.").lstrip("."), Kind.BUFFER)
        for name, given in self.batch.items():
            self._mark(given, name, Kind.INPUT)
        self.note_gradients()
        if self.optimizer is None:
            return
        for name, table in getattr(self.optimizer, "shared", {}).items():
            self._mark(table, name, Kind.OPTIMIZER_STATE)
        for parameter, state in self.optimizer.state.items():
            owner = self.names.get(id(parameter), "parameter")
            for key, held in state.items():
                if isinstance(held, torch.Tensor):
                    # torch/optim/adam.py, `_init_group`: step is a cpu scalar unless fused or capturable
                    host = self.host_scalars and key == "step" and held.dim() == 0
                    host = host or getattr(held, "is_paged", False)  # bitsandbytes' managed memory
                    self._mark(held, f"{owner}.{key}", Kind.OPTIMIZER_STATE, owner, "host" if host else "gpu")

    def note_gradients(self, phase: str = "optimizer") -> None:
        """Marks the gradients that parameters hold now; to be called where backward has ended."""
        if not phase.endswith("optimizer"):
            return
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                owner = self.names[id(parameter)]
                self._mark(parameter.grad, f"{owner}.grad", Kind.GRADIENT, owner)
