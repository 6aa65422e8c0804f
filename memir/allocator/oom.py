"""Out of memory: the figures, and the text that PyTorch raises with them (DeviceCachingAllocator::malloc, format_size)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memir.errors import EXIT_NO, MemirError


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """What the allocator knew when it gave up, after all cached memory had gone back to the device. All in bytes."""

    requested: int  # what the operator asked for
    tried: int  # the segment that was tried for it
    total: int  # the device's memory as the driver reports it
    free: int  # what was left of it
    allocated: int
    reserved: int
    allowed: int | None = None  # per_process_memory_fraction of the total

    @property
    def message(self) -> str:
        """The text of torch.OutOfMemoryError, in the words of torch 2.10 and later."""
        allowed = "" if self.allowed is None else f"{format_size(self.allowed)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.tried)}. GPU 0 has a total capacity of "
            f"{format_size(self.total)} of which {format_size(self.free)} is free. Including non-PyTorch memory, this process "
            f"has {format_size(self.total - self.free)} memory in use. {allowed}Of the allocated memory "
            f"{format_size(self.allocated)} is allocated by PyTorch, and {format_size(self.reserved - self.allocated)} is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


class OutOfMemoryError(MemirError):
    """A request that the device has no memory for; `oom` has the figures."""

    exit_code: ClassVar[int] = EXIT_NO

    def __init__(self, oom: OutOfMemory) -> None:
        super().__init__(oom.message)
        self.oom = oom


def format_size(nbytes: int) -> str:
    """An amount of memory as PyTorch writes it: `20.00 MiB`, and up to 1024 without a fraction, `512 bytes`."""
    if nbytes <= 2**10:
        return f"{nbytes} bytes"
    for unit, size in (("KiB", 2**10), ("MiB", 2**20)):
        if nbytes <= size * 2**10:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 2**30:.2f} GiB"
