"""A GPU as the cost model sees it: sustained rates, from the card's datasheet and what others measured of it.

| figure | source |
|---|---|
| rates, SMs, bandwidth | `memir/hardware/gpus.json`, datasheets |
| fractions of them that are reached | `memir.hardware.achieved`, published measurements of single kernels |
| a lower power limit | the clock goes with the cube root of the power: dynamic power is f * V^2 and V goes with f (e.g. Kim et al., "Leakage current: Moore's law meets static power", IEEE Computer 36(12), 2003) |
| launch | 0.9 us between kernels that are queued: 3.8 us for each against 2.9 us in the kernel (A. Gray, "Getting Started with CUDA Graphs", NVIDIA developer blog, 2019) |
| dispatch | 5 us of the host for an operator: the low end of what is told of Python, dispatcher, autograd and driver together |
| L2 to an SM | bytes a clock: 2048 of V100, 5120 of A100 (NVIDIA A100 whitepaper, "L2 cache"), shared by the SMs; Hopper's clusters read a tile once for two SMs (H100 whitepaper, "thread block clusters") |
"""  # noqa: E501 (a table)

from __future__ import annotations

from dataclasses import dataclass

from memir.hardware.achieved import achieved
from memir.hardware.cards import Card
from memir.hardware.links import host_bandwidth

LAUNCH = 0.9e-6  # seconds between two kernels
DISPATCH = 5e-6  # seconds of the host for an operator
BACKWARD_OF_FLASH = 63 / 73  # of the forward's rate: the most that FlashAttention-2 reaches on an A100 (arXiv 2307.08691, 4.1)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Operations and bytes a second, sustained; `flash` without a mask and with a causal one."""

    name: str
    sms: int
    half: float  # fp16 with sums in fp32
    brain: float  # bf16
    single: float  # fp32 outside of tensor cores, as PyTorch computes by default
    bandwidth: float
    flash: float
    flash_causal: float
    host: float  # bytes a second to and from the host's memory, one direction
    intensity: float  # operations for each byte that an SM reads of L2, above which its arithmetic is the limit

    def rate(self, dtype: str) -> float:
        """Operations a second of a large matrix product in this type."""
        return {"f16": self.half, "bf16": self.brain}.get(dtype, self.single)


def device(card: Card, *, power: float = 1.0, bandwidth: float | None = None) -> Device:
    """The card's device. `power`: its limit as a part of the usual one; `bandwidth`: bytes a second of another memory."""
    reached = achieved(card)
    clock = power ** (1 / 3)
    part = reached.product * clock
    tensor = card.bf16 or card.fp16
    # floating-point operations of tensor cores, a clock and SM, by generation (A100 and H100 whitepapers); bytes of L2 likewise
    operations, l2 = {7: (1024, 2048), 8: (2048, 5120)}.get(card.capability[0], (4096, 2 * 5120))
    if card.capability > (8, 0) and card.capability[0] == 8:
        operations = 1024  # GA102 and AD102: half the tensor rate of GA100 for each SM and clock
    return Device(
        name=card.name,
        sms=card.sms,
        half=card.fp16 * part,
        brain=(card.bf16 or card.fp32) * part,
        single=card.fp32 * part,
        bandwidth=(bandwidth or card.bandwidth) * reached.stream,
        flash=tensor * reached.flash * clock,
        flash_causal=tensor * reached.flash_causal * clock,
        host=host_bandwidth(card),
        intensity=operations / (l2 / card.sms),
    )
