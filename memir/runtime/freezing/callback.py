"""AutoFreeze in the Hugging Face Trainer. The only file of memir.freezing that imports transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from memir.errors import UsageError
from memir.runtime.freezing.auto import AutoFreeze, Predict
from memir.runtime.freezing.cache import ActivationCache

LOG = logging.getLogger("memir.freezing")
STATE = "freezing.pt"  # in each checkpoint's folder


class FreezingCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[FreezingCallback()])`, in one process or under DDP.

    num_intervals  how often it tests over the whole training, 20 in the released code's own runs
    interval       instead of it, optimizer steps between tests
    resume         the `freezing.pt` to go on from; default: that of the checkpoint in `output_dir` where the Trainer goes on

    The other arguments are AutoFreeze's. `freezer` is the AutoFreeze, once training has begun.
    """

    def __init__(
        self,
        *,
        num_intervals: int = 20,
        interval: int | None = None,
        percentile: float = 50,
        most: int | None = None,
        cache: ActivationCache | None = None,
        predict: Predict | None = None,
        resume: str | Path | None = None,
    ) -> None:
        if not isinstance(num_intervals, int) or num_intervals < 2:
            raise UsageError(f"num_intervals={num_intervals!r}: at least 2, since the first test compares two intervals")
        self.freezer: AutoFreeze | None = None
        self._num_intervals, self._interval, self._resume = num_intervals, interval, resume
        self._percentile, self._most, self._cache, self._predict = percentile, most, cache, predict
        self._loader: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finds the layers; goes on from a checkpoint; has the loader's batches announced to the cache."""
        interval = self._interval or max(1, state.max_steps // self._num_intervals)
        self.freezer = AutoFreeze(
            kwargs["model"],
            interval=interval,
            optimizer=kwargs.get("optimizer"),
            percentile=self._percentile,
            most=self._most,
            cache=self._cache,
            predict=self._predict,
        )
        if state.global_step > 0 or self._resume is not None:
            self._go_on(Path(self._resume or Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE))
        if self._cache is not None:
            self._loader = _announcing(kwargs.get("train_dataloader"), self.freezer)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the gradients, after clipping, and freezes."""
        assert self.freezer is not None
        self.freezer.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps the state beside the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.freezer is not None and state.is_world_process_zero and folder.is_dir():
            torch.save(self.freezer.state_dict(), folder / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gives the loader back as it was, and waits for what is still being written."""
        if self._loader is not None:
            self._loader.__class__ = type(self._loader).__mro__[1]
            self._loader = None
        if self._cache is not None:
            self._cache.flush()

    def _go_on(self, path: Path) -> None:
        assert self.freezer is not None
        if path.exists():
            self.freezer.load_state_dict(torch.load(path, weights_only=True))
        elif self._resume is not None:
            raise UsageError(f"no such file: {path}", hint=f"resume= takes the {STATE} of a checkpoint's folder")
        else:
            LOG.warning("no %s: freezing begins anew, with no layer frozen (FreezingCallback(resume=...) names the file)", path)


def _announcing(loader: Any, freezer: AutoFreeze) -> Any:
    """Has the DataLoader's batches read ahead, in place: the Trainer keeps the loader to itself. The object that was changed.

    Of one that accelerate has prepared it is the loader inside: reading that ahead leaves accelerate's own account of where
    an epoch ends alone.
    """
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, torch.utils.data.DataLoader):
        return None
    own: Any = type(inner)

    def iterate(self: Any) -> Iterator[Any]:
        return freezer.batches(own.__iter__(self))

    inner.__class__ = type(own.__name__, (own,), {"__iter__": iterate, "__module__": own.__module__})
    return inner
