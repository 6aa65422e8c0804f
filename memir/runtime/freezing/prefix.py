"""The frozen layers at a model's front: without gradients, in eval, out of the optimizer's state, passed over where cached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memir.errors import MemirError, UsageError
from memir.runtime.freezing.cache import ActivationCache
from memir.runtime.freezing.distributed import rebuild_reducers
from memir.runtime.freezing.frozen import check_layer, freeze_layer, freeze_module, thaw_class
from memir.runtime.freezing.parts import Before, Observer, find_layers, unwrapped
from memir.runtime.freezing.reuse import Reuse
from memir.runtime.freezing.samples import arguments_of, samples_of

LOG = logging.getLogger("memir.freezing")


class FrozenPrefix:
    """The first `cut` layers of `model`, frozen, with everything before them; the cut only grows.

    model      an nn.Module, plain or Hugging Face, or DistributedDataParallel around it
    optimizer  its states of frozen parameters are given back; all others are kept
    cache      where the frozen layers' activations are kept and read from

    What comes before the layers is read off a forward pass with gradients: the training's own, or `observe`. Parameters that
    are used after the prefix too (a tied head, layers that share weights) stay trainable, and `set_cut` says so.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, cache: ActivationCache | None = None) -> None:
        self.model = unwrapped(model)
        self.paths = find_layers(self.model)
        self.layers = tuple(self.model.get_submodule(path) for path in self.paths)
        self.optimizer, self.cache = optimizer, cache
        self.cut = 0
        self._before: Before | None = None
        self._observer: Observer | None = Observer(self.model, self.paths)
        self._reuse: Reuse | None = None
        self._shared: tuple[str, ...] = ()  # parameters of the prefix that train on

    @property
    def before(self) -> Before | None:
        """What comes before the layers; None until a forward pass with gradients was seen."""
        if self._before is None and self._observer is not None and self._observer.before is not None:
            self._before, self._observer = self._observer.before, None
        return self._before

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Calls the model once with a batch, to see what comes before its layers; random numbers stay as they were."""
        devices = {p.device for p in self.model.parameters() if p.device.type == "cuda"}
        with torch.enable_grad(), torch.random.fork_rng(sorted(d.index or 0 for d in devices)):
            self.model(*args, **kwargs)
        if self.before is None:
            raise UsageError(
                "nothing that the model returned has a gradient, so what comes before its layers cannot be seen",
                hint="call it as in training; at least one parameter must require a gradient",
            )

    def set_cut(self, cut: int, before: Before | None = None) -> str:
        """Freezes the first `cut` layers; what it did, in words. Nothing is done where `cut` is the present one.

        UsageError: a cut below the present one or beyond the layers; nothing was observed yet (and `before` is not given).
        """
        if not isinstance(cut, int) or isinstance(cut, bool) or not 0 <= cut <= len(self.layers):
            raise UsageError(f"cut {cut!r}: the model has {len(self.layers)} layers", hint=f"a cut is 0 to {len(self.layers)}")
        if cut < self.cut:
            raise UsageError(f"cut {cut} is below the present one, {self.cut}: a frozen prefix only grows")
        if before is not None:
            self._take(before)
        if cut == self.cut:
            return ""
        if self.before is None:
            raise UsageError(
                "what comes before the layers is not known yet: no forward pass with gradients was seen",
                hint="call observe(...) with a batch first, as the model is called in training",
            )
        for number in range(self.cut, cut):
            check_layer(self.layers[number], number)
        for number in range(self.cut, cut):
            freeze_layer(self.layers[number], self, number)
        self.cut = cut
        for path in self.before.modules:
            freeze_module(self.model.get_submodule(path))
        names, self._shared = self._frozen_names()
        self._give_up(names)
        rebuild_reducers(self.model)
        if self.cache is not None:
            if self._reuse is None:
                self._reuse = Reuse(self, self.cache)
            self._reuse.begin_cut(cut, self._shared)
        return self._told()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, read ahead so that cached activations are there when a batch's turn comes.

        A dictionary is what the model is called with by name, a tuple or list by position, a tensor alone.
        """
        if self.cache is None:
            yield from loader
            return
        waiting: list[Any] = []
        for batch in loader:
            self.announce(batch)
            waiting.append(batch)
            if len(waiting) > self.cache.depth:
                yield waiting.pop(0)
        yield from waiting

    def announce(self, batch: Any) -> None:
        """Has the cache read what this batch needs, in the background. A batch that it cannot tell is left alone."""
        if self.cache is None or not self.cut or not self.cache.is_on:
            return
        args: tuple[Any, ...] = tuple(batch) if isinstance(batch, tuple | list) else ()
        kwargs = dict(batch) if isinstance(batch, Mapping) else {}
        if isinstance(batch, torch.Tensor):
            args = (batch,)
        try:
            self.cache.announce(samples_of(arguments_of(self.model, args, kwargs)))
        except MemirError:
            return  # the forward pass says it, where it is so there, too

    def run_layer(self, number: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A frozen layer's forward."""
        with torch.no_grad():
            result = own(*args, **kwargs) if self._reuse is None else self._reuse.layer(number, own, args, kwargs)
        if self._shared:  # autocast of older PyTorch hands a cast made without gradients to the later layer that trains it
            torch.clear_autocast_cache()
        if number == self.cut - 1 and self.model.training and self._is_reentrant():
            next(iter(result if isinstance(result, tuple) else (result,))).requires_grad_(True)
        return result

    def remove(self) -> None:
        """Leaves the model as it is, its parameters frozen, and takes away everything else."""
        if self._observer is not None:
            self._observer.remove()
        if self._reuse is not None:
            self._reuse.remove()
        for module in self.model.modules():
            thaw_class(module)

    # -- parameters

    def _take(self, before: Before) -> None:
        known = dict(self.model.named_parameters())
        if strange := [name for name in before.parameters if name not in known]:
            raise UsageError(f"the model has no parameter {strange[0]!r}", hint="is the state that of another model?")
        self._before = before
        if self._observer is not None:
            self._observer.remove()
            self._observer = None

    def _frozen_names(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """Names of the parameters that freeze, and of those that are used after the prefix, too, and so do not."""
        assert self.before is not None
        inside = tuple(f"{path}." for path in self.paths[: self.cut])
        own: dict[int, str] = {}
        outside: set[int] = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name.startswith(inside):
                own.setdefault(id(parameter), name)
            elif name not in self.before.parameters:
                outside.add(id(parameter))
        named = dict(self.model.named_parameters())
        own.update({id(named[name]): name for name in self.before.parameters})
        shared = {key for key in own if key in outside} | {id(named[name]) for name in self.before.tied}
        return frozenset(n for k, n in own.items() if k not in shared), tuple(sorted(own[k] for k in shared))

    def _give_up(self, names: frozenset[str]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in names and parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None
                if self.optimizer is not None:
                    self.optimizer.state.pop(parameter, None)

    def _told(self) -> str:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.model.parameters())
        text = f"{trained / 1e6:.1f} M of {total / 1e6:.1f} M parameters stay trainable"
        if self._shared:
            text += f"; {', '.join(self._shared)} too: used after the frozen layers as well (tied or shared)"
        return text

    def _is_reentrant(self) -> bool:
        """Whether the layer after the cut is checkpointed by torch's reentrant form, which needs an input with a gradient."""
        if self.cut == len(self.layers) or not getattr(self.layers[self.cut], "gradient_checkpointing", False):
            return False
        function = getattr(self.layers[self.cut], "_gradient_checkpointing_func", None)
        return bool(getattr(function, "keywords", {}).get("use_reentrant", True))
