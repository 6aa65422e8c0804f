"""Replays on real tensors the few operators that lead to a value, at small B and S.

Only what starts from the batch or from constants can be replayed; weights and activations have no values. Routing is the
exception: `topk` and its kin over float scores are taken to spread the rows evenly over the experts.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import torch
from torch import fx

from memir.frontend.record import Event, Recorder, tensors_in

ROUTERS = frozenset(
    {"aten.topk", "aten.sort", "aten.sort.stable", "aten.argsort", "aten.argmax", "aten.max.dim", "aten.multinomial"}
)
_FLOATS = ("f32", "bf16", "f16", "f64")


class UnanswerableError(Exception):
    """The value depends on weights or activations."""


def is_router(recorder: Recorder, event: Event) -> bool:
    """An operator that picks experts by their scores."""
    return event.opcode in ROUTERS and bool(event.operands) and recorder.values[event.operands[0]].dtype in _FLOATS


def needed(recorder: Recorder, values: list[int]) -> list[Event]:
    """The operators, in order, that the values depend on: writers of the storages they read, transitively, up to routing."""
    pending: list[int] = []  # negated event numbers: the latest first
    seen: set[int] = set()
    storages: set[int] = set()

    def want(value: int, before: int) -> None:
        storage = recorder.values[value].storage
        if storage not in storages:
            storages.add(storage)
            for number in recorder.writers.get(storage, ()):
                if 0 <= number <= before and number not in seen:
                    seen.add(number)
                    heapq.heappush(pending, -number)

    for value in values:
        want(value, len(recorder.events))
    order: list[int] = []
    while pending:
        number = -heapq.heappop(pending)
        order.append(number)
        event = recorder.events[number]
        if not is_router(recorder, event):
            for operand in event.operands:
                want(operand, number)
    return [recorder.events[number] for number in sorted(order) if recorder.events[number].node is not None]


def routing_multiple(recorder: Recorder, events: list[Event]) -> int:
    """A multiple of 8 and of the number of experts of every router among the events: balanced loads come out whole."""
    multiple = 8
    for event in events:
        if is_router(recorder, event):
            experts = recorder.values[event.operands[0]].shape[-1]
            if experts.is_constant and experts.constant > 0:
                multiple = math.lcm(multiple, experts.constant)
    return multiple


class Replay:
    """One replay at one point. `inputs` gives real tensors for the storages of the batch, by storage number."""

    def __init__(self, recorder: Recorder, inputs: dict[int, Any], env: dict[str, int]) -> None:
        self.recorder, self.inputs, self.env = recorder, inputs, env
        self.tensors: dict[int, torch.Tensor] = {}
        self.routed = False

    def run(self, events: list[Event], values: list[int]) -> list[torch.Tensor]:
        """The real counterparts of `values`. Raises UnanswerableError."""
        for event in events:
            assert event.node is not None
            if is_router(self.recorder, event):
                self._route(event)
                continue
            out = event.node.target(*self._real(event.node.args), **self._real(event.node.kwargs))  # type: ignore[operator]
            self.tensors.update(zip(event.results, tensors_in(out), strict=False))
        return [self._tensor(value) for value in values]

    def _real(self, tree: Any) -> Any:
        if isinstance(tree, fx.Node):
            return self._tensor(self.recorder.by_node[tree])
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._real(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self._real(item) for key, item in tree.items()}
        if isinstance(tree, torch.SymInt):
            return self.recorder.sizes(tree).evaluate(self.env)
        if isinstance(tree, (torch.SymFloat, torch.SymBool)):
            raise UnanswerableError("it depends on a symbolic number")
        return tree

    def _tensor(self, value: int) -> torch.Tensor:
        found = self.tensors.get(value)
        if found is not None:
            return found
        record = self.recorder.values[value]
        make = self.inputs.get(record.storage)
        if make is None:
            raise UnanswerableError(f"it depends on the values of {self.recorder.storages[record.storage].name or record.name}")
        base: torch.Tensor = make([extent.evaluate(self.env) for extent in record.shape])
        self.tensors[value] = base
        return base

    def _route(self, event: Event) -> None:
        """Round robin: the picks of all rows, counted through, go to experts 0, 1, 2, ... in turn."""
        self.routed = True
        scores = self.recorder.values[event.operands[0]]
        experts = scores.shape[-1].evaluate(self.env)
        for value in event.results:
            record = self.recorder.values[value]
            shape = [extent.evaluate(self.env) for extent in record.shape]
            if record.dtype == "i64":
                self.tensors[value] = (torch.arange(math.prod(shape)) % experts).reshape(shape)
            else:
                self.tensors[value] = torch.ones(shape)
