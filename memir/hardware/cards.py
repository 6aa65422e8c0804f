"""The table of GPUs, `gpus.json`: what a card's memory holds, how fast it computes and moves, and who says so.

Capacity is what the CUDA driver reports (`cudaMemGetInfo`, `torch.cuda.get_device_properties`, "total capacity" in PyTorch's
out-of-memory message), which is less than what is printed on the box and changes a little with the driver: the least figure
that was found. Its public source stands beside it; where none was found it is derived from a card with the same memory, and
the source says so. FLOP/s are dense, without sparsity; for 16 bits with accumulation in fp32. Bandwidths of links are those
of both directions together, as datasheets give them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("gpus.json")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. Bytes, FLOP/s and bytes/s; None where the card does not have it."""

    key: str  # as it is listed: "a100-sxm4-80gb"
    name: str  # as the driver calls it: "NVIDIA A100-SXM4-80GB"
    aliases: tuple[str, ...]  # further names that people type
    nominal: int  # bytes, what is printed on the box
    capacity: int  # bytes, what the driver reports
    capacity_source: str
    capability: tuple[int, int]  # compute capability
    sms: int  # streaming multiprocessors
    fp32: float  # outside of tensor cores
    tf32: float | None
    fp16: float
    bf16: float | None
    fp8: float | None
    bandwidth: float  # of the memory
    nvlink: float | None
    pcie: float
    source: str  # of everything but the capacity

    @property
    def compute(self) -> str:
        """The compute capability as it is written: "8.0"."""
        return f"{self.capability[0]}.{self.capability[1]}"


@cache
def cards() -> tuple[Card, ...]:
    """Every card of the table, in its order: by generation, the small ones first."""
    return tuple(_card(row) for row in json.loads(TABLE.read_text(encoding="utf-8")))


def _card(row: dict[str, Any]) -> Card:
    major, minor = row["capability"].split(".")
    rates: dict[str, Any] = {name: None if rate is None else rate * 1e12 for name, rate in row["tflops"].items()}
    return Card(
        key=row["key"],
        name=row["name"],
        aliases=tuple(row["aliases"]),
        nominal=row["nominal_gib"] * 2**30,
        capacity=row["capacity_mib"] * MIB,
        capacity_source=row["capacity_source"],
        capability=(int(major), int(minor)),
        sms=row["sms"],
        bandwidth=row["bandwidth_gbs"] * 1e9,
        nvlink=None if row["nvlink_gbs"] is None else row["nvlink_gbs"] * 1e9,
        pcie=row["pcie_gbs"] * 1e9,
        source=row["source"],
        **rates,
    )
