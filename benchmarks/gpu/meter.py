"""What the allocator of a device says while steps run: by phase, reserved, and what the driver counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

STEPS = 4  # the first makes the optimizer's state; the last is measured


class Device(Protocol):
    """The calls of `torch.cuda` that are needed; a test stands in for them."""

    def synchronize(self) -> None: ...
    def memory_allocated(self) -> int: ...
    def max_memory_allocated(self) -> int: ...
    def max_memory_reserved(self) -> int: ...
    def memory_reserved(self) -> int: ...
    def reset_peak_memory_stats(self) -> None: ...
    def mem_get_info(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes of the last step. `phases` are allocated peaks; `device` is what the driver counts beside what is free."""

    steady: int
    peak: int
    reserved: int
    device: int
    phases: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Meter:
    """Call `on_phase` where the loop enters a phase; `measure` runs the steps."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._phase = ""
        self._phases: dict[str, int] = {}

    def on_phase(self, name: str) -> None:
        """Close the phase before, and begin this one. Phases of one name (micro-batches) count as one, by their last part."""
        self._close()
        self._phase = name.rpartition(".")[2]

    def _close(self) -> None:
        self._device.synchronize()
        if self._phase:
            peak = self._device.max_memory_allocated()
            self._phases[self._phase] = max(peak, self._phases.get(self._phase, 0))
        self._device.reset_peak_memory_stats()
        self._phase = ""

    def measure(self, step: Callable[[], object], steps: int = STEPS) -> Figures:
        """The figures of the last of so many steps; reserved bytes are the most over all of them."""
        reserved = steady = 0
        for number in range(steps):
            last = number == steps - 1
            self._phases = {}
            self._device.synchronize()
            steady = self._device.memory_allocated() if last else steady
            step()
            self._close()
            reserved = max(reserved, self._device.memory_reserved())
        free, total = self._device.mem_get_info()
        return Figures(steady, max(self._phases.values()), reserved, total - free, dict(self._phases))
