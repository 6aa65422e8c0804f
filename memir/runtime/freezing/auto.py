"""AutoFreeze: layers freeze from the front as their gradients settle (arXiv 2102.01386).

What differs from the released code: Adam's state of the layers that still train is kept (there the optimizer is made anew);
the sums of gradients cover only layers that still train; nothing is rebuilt, so a resumed run goes on as if it had not ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memir.errors import InconclusiveError, UsageError
from memir.runtime.freezing.cache import ActivationCache
from memir.runtime.freezing.change import Decision, GradientSums, decide
from memir.runtime.freezing.distributed import agreed, rank
from memir.runtime.freezing.parts import Before
from memir.runtime.freezing.prefix import FrozenPrefix

LOG = logging.getLogger("memir.freezing")
VERSION = 1  # of state_dict

Predict = Callable[[int], tuple[int, float]]  # cut -> (peak bytes of a step, its time in that of a step at cut 0)


@dataclass(frozen=True, slots=True)
class Event:
    """One test: after how many steps, what it decided, why."""

    step: int
    old: int
    cut: int
    why: str


class AutoFreeze:
    """Call `step()` between `backward()` and `optimizer.step()`; every `interval` steps it tests, and freezes what has settled.

    model       an nn.Module with a list of layers, plain, Hugging Face or in DistributedDataParallel
    interval    optimizer steps between tests; the first test is at the end of the second interval
    optimizer   its states of frozen parameters are given back (memory), all others are kept
    percentile  layers whose change lies below this percentile of the trainable layers' may freeze; 50 in the paper
    most        layers that may freeze at most; default all but one
    cache       keeps the frozen layers' activations; iterate over `batches(loader)` to have them read ahead
    predict     what a cut takes: (peak bytes, time as a ratio to cut 0); each event then says what it bought

    Events are logged by the logger `memir.freezing`, on rank 0, and kept in `events`. UsageError for values that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        interval: int,
        optimizer: Optimizer | None = None,
        percentile: float = 50,
        most: int | None = None,
        cache: ActivationCache | None = None,
        predict: Predict | None = None,
    ) -> None:
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise UsageError(f"interval={interval!r}: a number of optimizer steps, at least 1")
        if not 0 <= percentile <= 100:
            raise UsageError(f"percentile={percentile!r}: a number from 0 to 100")
        self.prefix = FrozenPrefix(model, optimizer, cache)
        num_layers = len(self.prefix.layers)
        if most is not None and not 0 <= most < num_layers:
            raise UsageError(
                f"most={most!r}: the model has {num_layers} layers, and one must stay", hint=f"0 to {num_layers - 1}"
            )
        self.most = num_layers - 1 if most is None else most
        self.interval, self.percentile, self.predict = interval, percentile, predict
        self.events: list[Event] = []
        self.num_steps = 0
        self._sums = GradientSums(self.prefix.layers)
        self._norms: list[float] | None = None  # of the interval before

    @property
    def cut(self) -> int:
        """The number of frozen layers."""
        return self.prefix.cut

    @property
    def nbytes(self) -> int:
        """Bytes that the sums of gradients take on the model's devices; 0 once no layer can freeze any more."""
        return self._sums.nbytes

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, their cached activations read ahead."""
        return self.prefix.batches(loader)

    def step(self) -> Event | None:
        """Counts the gradients of one optimizer step, before it; the event when layers froze.

        Newly frozen parameters have no gradient any more, so that the coming optimizer step leaves them alone.
        InconclusiveError when the first trainable layer had no gradient: reentrant checkpointing loses it behind frozen layers.
        """
        self.num_steps += 1
        if self.cut >= self.most:
            return None
        if not self._sums.add(self.cut):
            raise InconclusiveError(
                f"no gradient reached layer {self.cut}, the first that trains",
                where=self.prefix.paths[self.cut],
                hint="call step() after backward() and before zero_grad(); activation checkpointing needs use_reentrant=False",
            )
        if self._sums.steps < self.interval:
            return None
        norms = agreed(self._sums.norms(), next(self.prefix.model.parameters()).device)
        before, self._norms = self._norms, norms
        decision = None if before is None else decide(before, norms, self.cut, self.percentile, self.most)
        event = self._told(decision, before is None)
        self._sums.restart(self.most + 1 if self.cut >= self.most else self.cut)
        return event

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs; tensors are the sums of the present interval, on the CPU."""
        before = self.prefix.before
        return {
            "version": VERSION,
            "num_layers": len(self.prefix.layers),
            "cut": self.cut,
            "before": None if before is None else asdict(before),
            "num_steps": self.num_steps,
            "interval_steps": self._sums.steps,
            "norms": self._norms,
            "sums": [{name: tensor.cpu() for name, tensor in sums.items()} for sums in self._sums.sums],
            "events": [asdict(event) for event in self.events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. UsageError: a state of another model or version.

        The optimizer's own state may be loaded before or after: its parameter groups do not change.
        """
        if state.get("version") != VERSION or state.get("num_layers") != len(self.prefix.layers):
            raise UsageError(
                f"the state is of version {state.get('version')} and {state.get('num_layers')} layers",
                where=f"here: version {VERSION}, {len(self.prefix.layers)} layers",
            )
        before = state["before"]
        named = None if before is None else Before(**{name: tuple(value) for name, value in before.items()})
        self.prefix.set_cut(state["cut"], named)
        self.num_steps, self._norms = state["num_steps"], state["norms"]
        self._sums.steps = state["interval_steps"]
        for layer, sums, saved in zip(self.prefix.layers, self._sums.sums, state["sums"], strict=True):
            parameters = dict(layer.named_parameters())
            sums.clear()
            sums.update({name: tensor.to(parameters[name].device, copy=True) for name, tensor in saved.items()})
        self.events = [Event(**event) for event in state["events"]]

    def _told(self, decision: Decision | None, is_first: bool) -> Event | None:
        """Does what was decided, logs it and keeps it."""
        if decision is None:
            if not is_first:
                LOG.warning("step %d: a gradient norm is not a finite number: nothing is frozen in this test", self.num_steps)
            return None
        why = decision.why()
        if decision.cut > decision.old:
            why = f"{why}; {self.prefix.set_cut(decision.cut)}{self._bought(decision.old, decision.cut)}"
        event = Event(self.num_steps, decision.old, decision.cut, why)
        self.events.append(event)
        if rank() == 0:
            LOG.info("step %d: cut %d of %d: %s", event.step, event.cut, len(self.prefix.layers), why)
        return event if event.cut > event.old else None

    def _bought(self, old: int, cut: int) -> str:
        if self.predict is None:
            return ""
        (before, slow), (now, fast) = self.predict(old), self.predict(cut)
        gib = 1 << 30
        return (
            f"; predicted: peak {before / gib:.2f} -> {now / gib:.2f} GiB, "
            f"time of a step {slow:.2f} -> {fast:.2f} of that at cut 0"
        )
