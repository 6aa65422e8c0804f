"""What autograd keeps for backward: read off its graph after the forward, node by node."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Any

import torch

from memir.frontend.record import Recorder, tensors_in


@lru_cache(maxsize=1024)
def _attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def saved_storages(loss: torch.Tensor, recorder: Recorder) -> dict[int, set[int]]:
    """Sequence number of each autograd node behind `loss` -> the recorder's storages that it holds.

    Nodes made under saved-tensor hooks (checkpointing) hold what the hooks returned and are left out. Source of the attributes:
    torch/csrc/autograd/generated (`_saved_self` and so on); custom functions have `saved_tensors`.
    """
    numbered = {event.sequence: event.hooked for event in recorder.events if event.sequence is not None and not event.backward}
    numbers = sorted(numbered)
    saved: dict[int, set[int]] = {}
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    recorder.paused += 1
    try:
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending.extend(next_node for next_node, _ in node.next_functions)
            sequence = node._sequence_nr()
            before = bisect_right(numbers, sequence)  # a custom function has a number between those of operators
            if before and numbered[numbers[before - 1]]:
                continue
            held = {
                index for tensor in _held(node) if (index := recorder.live.get(tensor.untyped_storage()._cdata)) is not None
            }
            if held:
                saved[sequence] = held
    finally:
        recorder.paused -= 1
    return saved


def _held(node: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    kind: type = type(node)
    for name in _attributes(kind):
        try:
            found += tensors_in(getattr(node, name))
        except RuntimeError:  # the tensor was changed in place since: backward would fail here too
            continue
    if hasattr(node, "saved_tensors"):
        found += tensors_in(node.saved_tensors)
    return found
