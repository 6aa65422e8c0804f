"""The device's memory as the allocator meets it: cudaMalloc, and pages mapped into reserved addresses.

Addresses are made up, increasing and never used twice, so that a simulation is the same every time. They stay below 2**53,
which the viewer of snapshots needs.
"""

from __future__ import annotations

from collections.abc import Iterable

PAGE = 2 * 2**20  # what cudaMalloc and cuMemCreate give is a multiple of it
FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED = 2**40  # the device's memory that address space is reserved for where no capacity is given: 1 TiB


class Device:
    """Memory of `capacity` bytes, None for no limit. `addresses` are the ones to give, as long as there are some."""

    def __init__(self, capacity: int | None, addresses: Iterable[int] = ()) -> None:
        self.capacity = capacity
        self.used = 0
        self._address = FIRST_ADDRESS
        self._given = iter(addresses)

    @property
    def free(self) -> int:
        """Bytes that are left, as cudaMemGetInfo says; with no limit, all there could be."""
        return (UNLIMITED if self.capacity is None else self.capacity) - self.used

    def take(self, size: int) -> bool:
        """Physical memory (cuMemCreate); whether there was enough."""
        pages = -(-size // PAGE) * PAGE
        if self.capacity is not None and self.used + pages > self.capacity:
            return False
        self.used += pages
        return True

    def give_back(self, size: int) -> None:
        """The opposite of `take` (cuMemRelease, cudaFree)."""
        self.used -= -(-size // PAGE) * PAGE

    def reserve(self, size: int) -> int:
        """Address space without memory (cuMemAddressReserve)."""
        given = next(self._given, None)
        if given is not None:
            return given
        address = self._address
        self._address += -(-size // PAGE) * PAGE
        return address

    def malloc(self, size: int) -> int | None:
        """The address of new memory (cudaMalloc); None if there is not enough."""
        return self.reserve(size) if self.take(size) else None

    def adopt(self, address: int, size: int) -> None:
        """Memory that is in use already; new one gets higher addresses."""
        self.take(size)
        self._address = max(self._address, address + -(-size // PAGE) * PAGE)


class ExpandableSegment:
    """Address space for the whole device, of which granules get memory: c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment.

    A granule is 2 MiB for the small pool and large_segment_size (20 MiB) for the large one.
    """

    def __init__(self, device: Device, granule: int, size: int) -> None:
        memory = UNLIMITED if device.capacity is None else device.capacity
        self.granule = granule
        self.size = -(-max(memory + memory // 8, size) // granule) * granule  # 1 1/8 of the device's memory
        self.address = device.reserve(self.size)
        self._device = device

    def map(self, address: int, size: int) -> int:
        """Put memory behind whole granules from `address` on; the bytes mapped, at least `size`, or 0: out of memory."""
        end = -(-(address + size - self.address) // self.granule)
        mapped = self.address + end * self.granule - address
        return mapped if self._device.take(mapped) else 0

    def unmap(self, address: int, size: int) -> tuple[int, int]:
        """Take the memory from the granules that lie wholly within; where they begin and their bytes, which may be 0."""
        begin = -(-(address - self.address) // self.granule)
        end = (address + size - self.address) // self.granule
        if begin >= end:
            return address, 0
        nbytes = (end - begin) * self.granule
        self._device.give_back(nbytes)
        return self.address + begin * self.granule, nbytes
