"""The largest batch that fits under LLMem's recipe, and the bytes at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)

import memir
from benchmarks.llmem_single.facts import CARD, MIB, PER_PARAMETER, SEQ, Fact
from memir.cuda.context import context, cublas_workspace
from memir.hardware import find_card
from memir.ir.core import Kind
from memir.ir.size import Size
from memir.recipe import Recipe

RECIPE = Recipe(dtype="f16", attention="eager", checkpoint="full", optimizer="none", gpu="7.0")
V100 = find_card("v100-sxm2-16gb")


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one model. `batch` is the largest that fits with the most that the context may take, `most` with the least."""

    name: str
    parameters: int
    batch: int
    most: int
    at_batch: int  # bytes on the device at `batch`, with the most for the context
    a_sample: int  # what one more sequence takes
    measured: int
    llmem: int
    place: str

    @property
    def error(self) -> float:
        """Of the bytes at `batch` against the measured ones, percent."""
        return 100 * (self.at_batch / self.measured - 1)


def loss_of_4_29(upcast: bool) -> Any:
    """The loss that transformers 4.29.2 has in the model's own file: shifted logits in a copy, in the logits' type."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        if upcast:
            logits = logits.to(torch.float32)
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return F.cross_entropy(shift_logits.view(-1, vocab_size), shift_labels.view(-1))

    return loss


@contextmanager
def as_in_4_29(fact: Fact) -> Iterator[None]:
    """Within, transformers' models compute their loss as 4.29.2 did."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    with mock.patch.dict(LOSS_MAPPING, ForCausalLM=loss_of_4_29(fact.upcast)):
        yield


def predict(fact: Fact) -> Row:
    """The step traced without optimizer, its gradients taken to lie in the parameters' place."""
    with as_in_4_29(fact):
        traced = memir.trace(fact.preset, RECIPE, batch=8, seq=SEQ)
    held = tuple(replace(s, nbytes=Size.of(0)) if s.kind is Kind.GRADIENT else s for s in traced.program.storages)
    peak = memir.peak(replace(traced.program, storages=held))
    parameters = sum(s.nbytes.evaluate({}) for s in traced.program.storages if s.kind is Kind.PARAMETER) // 2
    always = PER_PARAMETER * parameters + 2 * cublas_workspace("7.0")
    least, most = context(V100)

    def device(batch: int, more: int) -> int:
        return peak.evaluate({"B": batch, "S": SEQ})[0] + always + more

    def largest(more: int) -> int:
        batch = 2
        while device(batch + 1, more) <= CARD * MIB:
            batch += 1
        return batch

    batch = largest(most)
    place = peak.evaluate({"B": batch, "S": SEQ})[1].place
    return Row(
        fact.name,
        parameters,
        batch,
        largest(least),
        device(batch, most),
        device(batch + 1, most) - device(batch, most),
        fact.measured * MIB,
        fact.llmem * MIB,
        f"{place.phase}, {place.opcode}",
    )
