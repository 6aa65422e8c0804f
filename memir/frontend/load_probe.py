"""One tiny forward on fake tensors: does the model take the ids, and where in what comes back is the loss?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from memir.errors import UsageError
from memir.frontend.entry import Entry
from memir.frontend.load_build import CudaMeans, replace_tensors
from memir.frontend.load_import import describe, user_line
from memir.frontend.load_returns import loss_by_names
from memir.frontend.loaded import Call

BATCH = 2
_UNTRIED = (  # not the model's fault: the trace says what to do about it, or comes through where this could not
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_LAYERS_KEPT = 2
_LOSS_NAMES = ("loss", "lm_loss", "total_loss", "ce_loss", "last_loss")
_LOGITS_NAMES = ("logits", "output", "outputs", "prediction_logits")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a forward gave back, and the scalars that it stored on the module."""

    output: Any
    stored: dict[str, torch.Tensor]


class _ForwardError(Exception):
    """The user's forward raised `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def find_call(
    module: nn.Module,
    entry: Entry,
    *,
    layers: tuple[str, ...],
    seqs: Sequence[int],
    roots: tuple[str, ...],
    assumptions: list[str],
) -> Call:
    """The call with the loss's place, confirmed by a forward on fake tensors of shape [2, S] through at most two layers.

    UsageError: forward fails (shows the user's line), or nothing that it returns looks like a loss or like logits [B, S, V].
    """
    try:
        seen, seq = _observe(module, entry, layers, seqs, roots)
    except _UNTRIED:  # the code asks for values, or has an operator of its own: only tracing can tell
        loss = entry.loss or loss_by_names(module.forward)
        if not loss:
            raise UsageError(
                f"where the loss of {type(module).__name__} is cannot be seen: its forward depends on the data",
                hint="say it:  --inputs loss=item:1   (or return, attr:loss, module:last_loss, logits:return)",
            ) from None
        if not entry.loss:
            assumptions.append(f"the loss is taken to be {loss}, by the names in forward (--inputs loss=... says otherwise)")
        return _call(entry, loss)
    found = entry.loss or _loss_place(seen, seq, entry, assumptions)
    if not found:
        raise UsageError(
            f"no loss and no logits in what forward() of {type(module).__name__} returns: {_shape_of(seen.output)}",
            where=f"ids of shape [B={BATCH}, S={seq}]"
            + (f", targets as {entry.targets!r}" if entry.targets else ", no targets"),
            hint="say where the loss is:  --inputs loss=item:1   (or logits:return, attr:loss, module:last_loss)",
        )
    if found.startswith("logits:"):
        assumptions.append("only logits come back: the loop adds F.cross_entropy over the shifted logits, in their dtype")
    return _call(entry, found)


def _call(entry: Entry, loss: str) -> Call:
    return Call(ids=entry.ids, targets=entry.targets, mask=entry.mask, constants=entry.constants, loss=loss)


def _observe(
    module: nn.Module, entry: Entry, layers: tuple[str, ...], seqs: Sequence[int], roots: tuple[str, ...]
) -> tuple[Seen, int]:
    """Try the sequence lengths in turn, first with two layers and then, should the model want them all, with all."""
    for left_out in (layers[_LAYERS_KEPT:], ()):
        failures: list[tuple[int, Exception]] = []
        for seq in seqs:
            try:
                return _forward(module, entry, left_out, seq), seq
            except _ForwardError as error:
                failures.append((seq, error.cause))
        if not left_out:
            break
    seq, failure = failures[0]
    place = user_line(failure, roots)
    name = type(module).__name__
    raise UsageError(
        f"forward() of {name} fails on {entry.ids} of shape [B, S]",
        where="\n".join(filter(None, [place, describe(failure), f"B was {BATCH}, S was {seq}"])),
        hint=f"what forward is given can be said:  --inputs ids={entry.ids},targets={entry.targets or 'none'}",
    ) from None


def _forward(module: nn.Module, entry: Entry, left_out: tuple[str, ...], seq: int) -> Seen:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _as_it_was(module), mode, CudaMeans("cpu"):
        for path in left_out:
            parent, _, name = path.rpartition(".")
            del module.get_submodule(parent)._modules[name]
        replace_tensors(module, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu"))
        before = {name: id(value) for name, value in vars(module).items()}
        tensors = {name: torch.zeros((BATCH, seq), dtype=torch.long) for name in (entry.ids, entry.targets, entry.mask) if name}
        try:
            output = module(**tensors, **dict(entry.constants))
        except _UNTRIED:
            raise
        except Exception as error:  # a boundary: the user's forward may raise anything
            raise _ForwardError(error) from error
        stored = {n: v for n, v in vars(module).items() if before.get(n) != id(v) and _is_scalar(v)}
    return Seen(output, stored)


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back every attribute, parameter, buffer and submodule that is replaced within."""
    kept = [(m, dict(vars(m)), dict(m._parameters), dict(m._buffers), OrderedDict(m._modules)) for m in list(module.modules())]
    try:
        yield
    finally:
        for m, attributes, parameters, buffers, modules in kept:
            m.__dict__.clear()
            m.__dict__.update(attributes)
            _refill(m._parameters, parameters)
            _refill(m._buffers, buffers)
            _refill(m._modules, modules)


def _refill(registry: dict[str, Any], kept: dict[str, Any]) -> None:
    registry.clear()
    registry.update(kept)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == 1 and value.dim() <= 1


def _is_logits(value: Any, seq: int) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and tuple(value.shape[:2]) == (BATCH, seq)
        and value.dim() == 3
    )


def _loss_place(seen: Seen, seq: int, entry: Entry, assumptions: list[str]) -> str:
    """The place of the loss: returned, an item, an attribute, stored on the module; else of the logits; else empty."""
    places = list(_places(seen.output))
    scalars = [place for place, _, value in places if _is_scalar(value) and value.requires_grad]
    if not scalars:
        scalars = [place for place, _, value in places if _is_scalar(value)]
    if scalars:
        named = [p for p in scalars if p.partition(":")[2] in _LOSS_NAMES]
        chosen = named[0] if named else scalars[0]
        if len(scalars) > 1 and not named:
            assumptions.append(f"forward returns {len(scalars)} scalars; the loss is taken to be {chosen} (--inputs loss=...)")
        return chosen
    if seen.stored and entry.targets:
        names = sorted(seen.stored, key=lambda n: (_LOSS_NAMES.index(n) if n in _LOSS_NAMES else 9, "loss" not in n, n))
        return f"module:{names[0]}"
    logits = [(name in _LOGITS_NAMES, place) for place, name, value in places if _is_logits(value, seq)]
    return f"logits:{max(logits, key=lambda item: item[0])[1]}" if logits else ""


def _places(output: Any) -> Iterator[tuple[str, str, Any]]:
    """(place, name, value) of everything in a returned tensor, tuple, list, dictionary or object with attributes."""
    if isinstance(output, torch.Tensor):
        yield "return", "", output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            yield (f"attr:{name}" if getattr(output, str(name), None) is value else f"item:{name}"), str(name), value
    elif isinstance(output, (tuple, list)):
        names = getattr(output, "_fields", ())
        for i, value in enumerate(output):
            yield (f"attr:{names[i]}" if names else f"item:{i}"), (names[i] if names else ""), value
    else:
        slots = getattr(type(output), "__slots__", ())
        for name in [*getattr(output, "__dict__", {}), *([slots] if isinstance(slots, str) else slots)]:
            yield f"attr:{name}", name, getattr(output, name, None)


def _shape_of(output: Any) -> str:
    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return type(value).__name__

    if isinstance(output, Mapping):
        return "{" + ", ".join(f"{k}: {one(v)}" for k, v in list(output.items())[:8]) + "}"
    if isinstance(output, (tuple, list)):
        return "(" + ", ".join(one(v) for v in output[:8]) + ")"
    return one(output)
