"""PyTorch's pipeline schedules as they run on one rank: what is called in which order, and which variable holds what meanwhile.

torch/distributed/pipelining/schedules.py: `ScheduleGPipe._step_microbatches`, `Schedule1F1B._step_microbatches` and
`_PipelineScheduleRuntime._step_microbatches`; stage.py: `forward_one_chunk`, `backward_one_chunk`, `get_bwd_send_ops`.

With NCCL a send lets go of its tensor when it was waited for (ProcessGroupNCCL.cpp, `WorkNCCL::wait`); gloo's keeps it as long
as the schedule keeps the work (ProcessGroupGloo.cpp, `SendWork`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from memir.parallel.holding import RUNNING, Holding
from memir.parallel.schedules import Action


class Rank(Protocol):
    """What a schedule runs. The storages that a micro-batch sends are followed in `holding`; () where a stage sends nothing."""

    holding: Holding

    def forward(self, stage: int, micro: int) -> tuple[str, ...]:
        """Runs a forward; the storage of its output, the logits on the last stage."""
        ...

    def loss(self, stage: int, micro: int) -> None:
        """Computes the loss of the last stage's output."""
        ...

    def backward(self, stage: int, micro: int) -> tuple[str, ...]:
        """Runs a backward; the storage of the gradient that goes back to the stage before."""
        ...

    def backward_input(self, stage: int, micro: int) -> None:
        """Runs the backward of a stage's input, which keeps its gradient until the next step; nothing on the first stage."""
        ...

    def backward_weight(self, stage: int, micro: int) -> None:
        """Runs the backward of a stage's parameters; the whole backward on the first stage."""
        ...

    def is_last(self, stage: int) -> bool:
        """Whether no stage follows."""
        ...

    def settle(self) -> None:
        """What nobody holds any more dies here."""
        ...


@dataclass(slots=True)
class Run:
    """One step's micro-batches. `keeps`: finished sends keep their tensors (gloo)."""

    rank: Rank
    keeps: bool

    def _put(self, slot: str, storages: tuple[str, ...]) -> None:
        self.rank.holding.put(slot, storages)
        self.rank.settle()

    def _forward(self, action: Action) -> tuple[str, ...]:
        """forward_one_chunk: the output is in fwd_cache; then `_maybe_compute_loss`. What is sent."""
        output = self.rank.forward(action.stage, action.micro)
        self.rank.holding.put(f"fwd_cache {action.stage} {action.micro}", output)
        self.rank.holding.put(RUNNING, ())
        self._put("output", output)
        if not self.rank.is_last(action.stage):
            return output
        self.rank.loss(action.stage, action.micro)
        return ()

    def _backward(self, action: Action) -> tuple[str, ...]:
        """backward_one_chunk: it takes the output from fwd_cache and returns without it. What is sent."""
        returned = self.rank.backward(action.stage, action.micro)
        self.rank.holding.put("bwd_cache", returned)
        self.rank.holding.put(RUNNING, ())
        self._put(f"fwd_cache {action.stage} {action.micro}", ())
        return returned

    def gpipe(self, order: Sequence[Action]) -> None:
        """All forwards, all backwards; sends are waited for after each of the two loops."""
        holding = self.rank.holding
        works = "fwd_sends_to_wait"
        for action in order:
            if action.kind == "B" and works == "fwd_sends_to_wait":
                works = "bwd_sends_to_wait"
                if not self.keeps:
                    self._put("fwd_sends_to_wait", ())
            self._put("ops", ())
            sent = self._forward(action) if action.kind == "F" else self._backward(action)
            holding.put("ops", sent)
            holding.append(works, sent)
            self._put("bwd_cache", ())

    def one_by_one(self, order: Sequence[Action]) -> None:
        """1F1B: sends are fused with the receives of what comes next, and only the latest are in variables."""
        holding = self.rank.holding
        warmup = order.index(next(a for a in order if a.kind == "B"))
        for number, action in enumerate(order):
            if action.kind == "F":
                sent = self._forward(action)
                if number < warmup:
                    self._put("send_work", self._waited("send_work"))
                self._put("fwd_sends", sent)
                if number < warmup - 1:
                    self._put("send_work", sent)
                continue
            sent = self._backward(action)
            if order[number - 1].kind == "B":
                self._put("send_work", self._waited("send_work"))
            holding.put("bwd_sends", sent)
            self._put("bwd_cache", ())
            if number + 1 == len(order) or order[number + 1].kind == "B":
                self._put("send_work", sent)

    def runtime(self, order: Sequence[Action]) -> None:
        """Several stages a rank: every send is kept until all actions are done."""
        for action in order:
            if action.kind in "IW":
                self._part(action)
                continue
            sent = self._forward(action) if action.kind == "F" else self._backward(action)
            self._put("output", ())
            self.rank.holding.append("send_ops", sent)
            self._put("bwd_cache", ())

    def _part(self, action: Action) -> None:
        """A half of a backward: between them backward_state has the output, detached (stage.py, `backward_one_chunk`)."""
        state, cache = (f"{name} {action.stage} {action.micro}" for name in ("backward_state", "fwd_cache"))
        if action.kind == "I":
            self.rank.backward_input(action.stage, action.micro)
            if not self.rank.is_last(action.stage):
                self.rank.holding.put(state, self.rank.holding.slots.get(cache, ()))
            self._put(cache, ())
            return
        self.rank.backward_weight(action.stage, action.micro)
        self.rank.holding.put(RUNNING, ())
        self._put(state, ())

    def _waited(self, slot: str) -> tuple[str, ...]:
        return self.rank.holding.slots.get(slot, ()) if self.keeps else ()

    def end(self) -> None:
        """The call returns: its variables go."""
        for slot in (
            "output",
            "ops",
            "fwd_sends",
            "bwd_sends",
            "send_work",
            "fwd_sends_to_wait",
            "bwd_sends_to_wait",
            "send_ops",
        ):
            self.rank.holding.put(slot, ())
        self.rank.settle()
