"""The training loop that memir describes: one place for the step that is traced and for the step that is really run.

`memir.frontend.prepare` makes the module that is trained and `memir.frontend.optimizers` its optimizer; `Step` runs one
optimizer step with them and announces its phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import nn

from memir.errors import UsageError
from memir.frontend import trainer
from memir.frontend.loaded import Call
from memir.recipe import Recipe

Batch = Mapping[str, torch.Tensor]


def batch_spec(call: Call) -> tuple[str, ...]:
    """Names of the int64 tensors of shape [B, S] that the caller holds: ids, targets and the mask, each its own storage."""
    return tuple(name for name in (call.ids, call.targets, call.mask) if name is not None) + (
        ("targets",) if call.targets is None and call.loss.startswith("logits:") else ()
    )


class Step:
    """One optimizer step: forward, loss, backward (per micro-batch), clipping, optimizer, zero_grad.

    Calls `on_phase(name)` at the start of every phase: forward, backward, optimizer; with N > 1 micro-batches micro0.forward,
    micro0.backward, ..., `on_event(name)` before storages die without an operator (zero_grad, drop_outputs, drop_loss), and
    `on_loss(loss)` before backward.
    The batch belongs to the caller and lives across steps. With `recipe.loop` "trainer" it is the step of Hugging Face's
    Trainer (`memir.frontend.trainer`).
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer | None,
        on_phase: Callable[[str], None] = lambda name: None,
        on_event: Callable[[str], None] = lambda name: None,
        on_loss: Callable[[torch.Tensor], None] = lambda loss: None,
    ) -> None:
        self.module, self.call, self.recipe, self.optimizer = module, call, recipe, optimizer
        self.on_phase, self.on_event, self.on_loss = on_phase, on_event, on_loss
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.outputs: Any = None
        self.is_trainers = recipe.loop == "trainer"
        self.counts = self.is_trainers and call.targets is not None and trainer.takes_number(module)
        self.arguments: dict[str, Any] = {}  # what Trainer tells the model beside the batch
        self.scalars: list[torch.Tensor] = []  # what its loop holds from step to step: the losses' sum, the loss, the norm

    def begin(self, batch: Batch) -> None:
        """What Trainer does before the first forward of a step: the targets of all micro-batches are counted."""
        if self.counts:
            self.arguments = trainer.number_of_targets([batch[self.call.targets or ""]] * self.recipe.accumulate)

    def prime(self, batch: Batch) -> None:
        """Makes the scalars that a loop of Trainer's holds from its first step on."""
        self.begin(batch)
        if self.is_trainers:
            self.scalars = [torch.zeros(()), torch.zeros(())]
        if self.is_trainers and self.recipe.clip:  # the norm has the gradients' dtype
            self.scalars.append(torch.zeros((), dtype=reduce(torch.promote_types, (p.dtype for p in self.parameters))))

    def hold(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch, which Trainer's loop keeps until the next one and adds up."""
        if self.is_trainers:
            self.scalars[1] = loss.detach()
            self.scalars[0] += self.scalars[1]

    def held(self) -> dict[str, torch.Tensor]:
        """The scalars by name."""
        numbers = {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}
        return {**numbers, **dict(zip(("sum_of_losses", "loss", "gradient_norm"), self.scalars, strict=False))}

    def forward(self, batch: Batch) -> Any:
        """The model's outputs for the batch, called as the recipe says."""
        call = self.call
        kwargs = {name: batch[name] for name in (call.ids, call.targets, call.mask) if name is not None}
        with self._autocast(batch):
            outputs = self.module(**kwargs, **dict(call.constants), **self.arguments)
        return trainer.widened(outputs) if self.is_trainers and self.recipe.amp != "none" else outputs

    def _autocast(self, batch: Batch) -> AbstractContextManager[Any]:
        if self.recipe.amp == "none":
            return nullcontext()
        device = next(iter(batch.values())).device.type
        return torch.autocast(device, torch.bfloat16 if self.recipe.amp == "bf16" else torch.float16)

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """The loss in the outputs, or the shifted cross entropy of the logits."""
        where, _, rest = self.call.loss.partition(":")
        if where == "module":
            unwrap = getattr(self.module, "get_base_model", None)
            base = self.module if unwrap is None else unwrap()
            stored: torch.Tensor = getattr(base, rest)
            return stored
        if where == "logits":
            logits = _pick(outputs, rest)
            targets = batch[self.call.targets or "targets"]
            with self._autocast(batch):
                return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return _pick(outputs, self.call.loss)

    def zero_grad(self) -> None:
        """Gradients set to None, as the optimizer's zero_grad(set_to_none=True) does."""
        self.on_event("zero_grad")
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self, batch: Batch) -> None:
        """Runs the step. After it, only what a real loop still holds is alive."""
        if self.recipe.mode == "forward":
            self.on_phase("forward")
            with torch.no_grad():
                outputs = self.forward(batch)
                loss = self.loss(outputs, batch)
            self.on_event("drop_outputs")
            if self.recipe.keep_outputs and not self.recipe.function:
                self.outputs = outputs
            del outputs, loss
            return
        count = self.recipe.accumulate
        if self.is_trainers and not self.scalars:
            self.prime(batch)
        for micro in range(count):
            prefix = f"micro{micro}." if count > 1 else ""
            self.on_phase(f"{prefix}forward")
            if micro == 0 and self.recipe.zero_grad == "first":
                self.zero_grad()
            if micro == 0:
                self.begin(batch)
            outputs = self.forward(batch)
            loss = self.loss(outputs, batch)
            self.on_event("drop_outputs")
            if self.recipe.keep_outputs:
                self.outputs = outputs
            del outputs
            if (count > 1 or self.is_trainers) and not self.arguments:
                loss = loss / count
            self.on_loss(loss)
            self.on_phase(f"{prefix}backward")
            self.backward(loss, micro)
            self.hold(loss)
            self.on_event("drop_loss")
            del loss
        self.on_phase("optimizer")
        self.update()
        if self.recipe.function and self.outputs is not None:
            self.on_event("drop_outputs")
            self.outputs = None

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        """The backward of micro-batch `micro`."""
        torch.autograd.backward(loss)

    def update(self) -> None:
        """Clipping, the optimizer's step, zero_grad."""
        if self.recipe.clip:
            norm = nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, foreach=self.recipe.target == "cuda")
            self.scalars[2:] = [norm] if self.is_trainers else []
            del norm
        if self.optimizer is not None:
            self.optimizer.step()
        if self.recipe.zero_grad == "last":
            self.zero_grad()


def _pick(outputs: Any, where: str) -> torch.Tensor:
    kind, _, key = where.partition(":")
    if kind == "return":
        picked = outputs
    elif kind == "item":
        picked = outputs[int(key)] if key.lstrip("-").isdigit() else outputs[key]
    elif kind == "attr":
        picked = getattr(outputs, key)
    else:
        raise ValueError(f"unknown place of the loss: {where}")
    if not isinstance(picked, torch.Tensor):
        raise UsageError(f"the model returned no tensor at {where!r}", hint="say where it is with  --inputs loss=...")
    return picked
