"""Which sample a row of a batch is: told by what the model is given, so that no data set need carry numbers.

A row's key is a digest of its token ids and of whatever else goes into the model with them (position ids) but labels.
Shuffling, other batches and other ranks do not matter; a sample that was tokenized or augmented anew is simply another sample.
"""

from __future__ import annotations

import hashlib
import inspect
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memir.errors import InconclusiveError
from memir.runtime.freezing.buffers import bytes_of

LABELS = frozenset({"labels", "label", "label_ids", "targets", "target", "y", "num_items_in_batch"})
MASKS = frozenset({"attention_mask", "mask"})  # [B, S], not 0 at real tokens


@dataclass(frozen=True, slots=True)
class Samples:
    """The rows of one batch: a key and the number of real tokens of each, and the batch's own length."""

    keys: tuple[bytes, ...]
    lengths: tuple[int, ...]
    length: int


def arguments_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the model by the names of its `forward`; `**kwargs` of it are flattened."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InconclusiveError(f"this is no call of {type(model).__name__}: {error}") from None
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return found


def samples_of(arguments: Mapping[str, Any]) -> Samples:
    """The batch's samples. InconclusiveError without token ids [B, S], or with padding before a real token."""
    tensors = {n: t.detach().cpu() for n, t in arguments.items() if isinstance(t, Tensor) and n not in LABELS and t.dim()}
    ids = next((t for t in tensors.values() if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool), None)
    if ids is None:
        raise InconclusiveError("no token ids [B, S] go into the model", hint="the activation cache knows samples by them")
    batch, length = ids.shape
    lengths = [length] * batch
    for name in MASKS & tensors.keys():
        mask = tensors[name]
        if mask.shape == ids.shape:
            lengths = _lengths(tensors.pop(name) != 0)
    digests = [hashlib.blake2b(digest_size=16) for _ in range(batch)]
    for name, tensor in sorted(tensors.items()):
        plain = tensor.long() if not tensor.is_floating_point() and not tensor.is_complex() else tensor
        for row, digest in enumerate(digests):
            digest.update(name.encode())
            part = plain[row] if plain.shape[0] == batch else plain
            part = part[: lengths[row]] if part.dim() and part.shape[0] == length else part
            digest.update(array("q", part.tolist()) if part.dtype == torch.long and part.dim() == 1 else _raw(part))
    return Samples(tuple(digest.digest() for digest in digests), tuple(lengths), length)


def _raw(tensor: Tensor) -> memoryview:
    return bytes_of(tensor.clone(memory_format=torch.contiguous_format))


def _lengths(real: Tensor) -> list[int]:
    """Real tokens of each row; they must come first, since activations of a row that is padded in front depend on its batch."""
    lengths = real.sum(1)
    expected = torch.arange(real.shape[1])[None, :] < lengths[:, None]
    if not torch.equal(real, expected):
        raise InconclusiveError(
            "a row is padded in front of or between real tokens",
            hint="cached activations need padding on the right:  tokenizer.padding_side = 'right'",
        )
    return [int(n) for n in lengths]
