"""What every oracle of a whole step compares: bytes at its start, peak and end."""

from __future__ import annotations

from benchmarks.accuracy_cpu.run import Figures


def assert_same(real: Figures, told: Figures, tolerance: int) -> None:
    """The predicted bytes are those of the real run, within `tolerance` bytes."""
    assert not real.error
    assert not told.error
    assert abs(told.at_start - real.at_start) <= tolerance
    assert abs(told.peak - real.peak) <= tolerance
    assert abs(told.at_end - real.at_end) <= tolerance
