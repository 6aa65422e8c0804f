"""A forward pass that begins in the middle: the layers whose result is cached are passed over.

Before a cut's activations are used, one batch proves that they may be: the prefix gives the same activations twice, in
training (no dropout or other chance in it), and the model gives the same outputs from the cached activations as from its own
(nothing but the hidden states goes from the prefix to what follows).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memir.errors import InconclusiveError, MemirError
from memir.runtime.freezing.buffers import fingerprint
from memir.runtime.freezing.cache import ActivationCache, Found
from memir.runtime.freezing.parts import tensors_in
from memir.runtime.freezing.samples import Samples, arguments_of, samples_of

if TYPE_CHECKING:
    from memir.runtime.freezing.prefix import FrozenPrefix

LOG = logging.getLogger("memir.freezing")


class _StopError(Exception):
    """The prefix has run; the rest is not needed."""


class _Begin:
    """The hook before the model's forward; a copy of the model has it, too, and is left alone."""

    def __init__(self, reuse: Reuse) -> None:
        self._reuse = reuse

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._reuse.model:
            self._reuse.begin(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Begin:
        return self


class Reuse:
    """What the layers of a prefix do in one forward pass, decided before it."""

    def __init__(self, prefix: FrozenPrefix, cache: ActivationCache) -> None:
        self._prefix = prefix
        self.model = prefix.model
        self._cache = cache
        self._cut = 0
        self._checked = self._checking = False
        self._found: Found | None = None  # where this pass begins
        self._write: Samples | None = None  # whose activations this pass computes and keeps
        self._rest: dict[int, tuple[Any, ...] | None] = {}  # what a layer returns behind the hidden states; None: only them
        self._seen: Tensor | None = None  # the prefix's result, while checking
        self._stop = False
        self._handle = self.model.register_forward_pre_hook(_Begin(self), with_kwargs=True)

    def begin_cut(self, cut: int, shared: tuple[str, ...]) -> None:
        """The prefix has grown; `shared` are the parameters in it that still train."""
        self._cut, self._checked = cut, False
        if shared:
            self._cache.turn_off(
                f"{', '.join(shared)} still train{'s' if len(shared) == 1 else ''} through what follows, so the frozen layers' "
                "activations change with each step (to cache them, freeze it for the whole run: requires_grad_(False))"
            )

    def remove(self) -> None:
        """Takes the hook away."""
        self._handle.remove()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass of the model: where it begins, what it keeps."""
        if self._checking:
            return
        self._found = self._write = None
        if not (self._cache.is_on and self._cut and self.model.training and torch.is_grad_enabled()):
            return
        try:
            samples = samples_of(arguments_of(self.model, args, kwargs))
            if not self._checked:
                self._check(args, kwargs)
            self._found = self._cache.take(samples)
        except (MemirError, OSError) as error:
            self._cache.turn_off(str(error))
            return  # and the prefix is computed
        if self._found is None or self._found.cut < self._cut:
            self._write = samples

    def layer(self, number: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The frozen layer `number`: run, or its result from the cache, or its input where a later layer has the result."""
        if self._found is not None and number < self._found.cut:
            given = _hidden(args, kwargs)
            hidden = given
            if number == self._found.cut - 1:
                hidden = self._found.hidden.pin_memory() if given.device.type == "cuda" else self._found.hidden
                hidden = hidden.to(given.device, non_blocking=True)
            rest = self._rest[number]
            return hidden if rest is None else (hidden, *rest)
        result = own(*args, **kwargs)
        if self._checking:
            self._look(number, result)
        elif number == self._cut - 1 and self._write is not None:
            self._cache.put(self._write, result if isinstance(result, Tensor) else result[0])
        return result

    # -- the proof

    def _look(self, number: int, result: Any) -> None:
        first = result[0] if isinstance(result, tuple) and result else result
        rest = result[1:] if isinstance(result, tuple) else ()
        if not isinstance(first, Tensor) or first.dim() != 3 or any(item is not None for item in rest):
            raise InconclusiveError(
                f"layer {number} returns more than hidden states [B, S, width], so it cannot be passed over"
            )
        self._rest[number] = rest if isinstance(result, tuple) else None
        if number == self._cut - 1:
            self._seen = first
            if self._stop:
                raise _StopError

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """InconclusiveError unless this cut's activations may stand for its layers; begins to keep them if so."""
        prefix = self._prefix
        modes = [(module, module.training) for module in self.model.modules()]
        devices = sorted({p.device.index or 0 for p in self.model.parameters() if p.device.type == "cuda"})
        self._checking = True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                hidden = self._run_prefix(args, kwargs)
                if not _same(hidden, self._run_prefix(args, kwargs)):
                    raise InconclusiveError(
                        "the frozen layers give other activations for the same batch: something random runs before them",
                        hint="a dropout that is called as a function, beside the embedding, stays on in training",
                    )
                self.model.eval()
                own = [tensor.cpu() for tensor in tensors_in(self.model(*args, **kwargs))]
                self._found = Found(self._cut, hidden.cpu())
                from_cache = [tensor.cpu() for tensor in tensors_in(self.model(*args, **kwargs))]
                if len(own) != len(from_cache) or not all(map(_same, own, from_cache)):
                    raise InconclusiveError(
                        "the outputs change when the frozen layers are passed over: more than their hidden states is used",
                        hint="a loss over all layers' routers, or states of each layer in the output?",
                    )
        finally:
            self._checking, self._found, self._seen = False, None, None
            torch.clear_autocast_cache()  # older releases of PyTorch hand casts made without gradients to the pass that trains
            for module, training in modes:
                module.training = training
        late = tuple(f"{path}." for path in prefix.paths[self._cut :])
        frozen = list(prefix.layers[: self._cut])
        mark = fingerprint(self.model, frozen, self._cut, late)
        self._cache.open(mark, self._cut, hidden.shape[-1], hidden.dtype)
        self._checked = True

    def _run_prefix(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self._stop = True
        try:
            self.model(*args, **kwargs)
        except _StopError:
            pass
        finally:
            self._stop = False
        if self._seen is None:
            raise InconclusiveError(f"the model did not run its layer {self._cut - 1}")
        seen, self._seen = self._seen, None
        return seen


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer is given: its first tensor."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, or as near as kernels that add in any order are."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other) or not one.is_floating_point():
        return torch.equal(one, other)
    difference = (one.float() - other.float()).abs().max()
    return bool(difference <= 16 * torch.finfo(one.dtype).eps * one.float().abs().max())
