"""memir.freezing: freeze layers from the front while fine-tuning, and cache what they compute (docs/freezing.md).

    from memir.freezing import ActivationCache, AutoFreeze

    freezer = AutoFreeze(model, interval=100, optimizer=optimizer, cache=ActivationCache("activations"))
    for batch in freezer.batches(loader):
        model(**batch).loss.backward()
        freezer.step()
        optimizer.step()
        optimizer.zero_grad()

With the Hugging Face Trainer: `Trainer(..., callbacks=[FreezingCallback()])`. Needs torch; only FreezingCallback transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memir.runtime.freezing.auto import AutoFreeze, Event
from memir.runtime.freezing.cache import ActivationCache
from memir.runtime.freezing.parts import Before
from memir.runtime.freezing.prefix import FrozenPrefix

if TYPE_CHECKING:
    from memir.runtime.freezing.callback import FreezingCallback

__all__ = ["ActivationCache", "AutoFreeze", "Before", "Event", "FreezingCallback", "FrozenPrefix"]


def __getattr__(name: str) -> Any:
    """FreezingCallback, which imports transformers, on first use (PEP 562)."""
    if name != "FreezingCallback":
        raise AttributeError(f"module 'memir.freezing' has no attribute {name!r}")
    from memir.runtime.freezing.callback import FreezingCallback

    return FreezingCallback
