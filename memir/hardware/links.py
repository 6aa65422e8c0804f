"""What GPUs are connected by: links within a node and between nodes, as NCCL's own model of them has it.

Bandwidths are those that NCCL plans with (github.com/NVIDIA/nccl, src/graph/topo.h): what a direction carries in practice and
not what the datasheet says. `PCI_BW`: 12 GB/s for 16 lanes of the third generation, twice that for each one after it.
`NET_BW`: 12 GB/s for a port of 100 Gbit/s. NVLink, a link and direction: 20 GB/s of 25 on Volta and Ampere (`SM70_NVLINK_BW`,
`SM80_NVLINK_BW`), 12 of 14.06 on GA102 (`SM86_NVLINK_BW`), 20.6 of 25 on Hopper, 40.1 of 50 on Blackwell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memir.errors import UsageError
from memir.hardware.cards import Card

_NVLINK = (((10, 0), 40.1 / 50), ((9, 0), 20.6 / 25), ((8, 6), 12 / 14.0625), ((0, 0), 20 / 25))
_PCIE = 12 / 16  # of a direction of 16 lanes of the third generation
_NET = 12 / 12.5
_PORTS = re.compile(r"(ib|roce|eth)-(\d+)")


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of connection. `bandwidth`: bytes a second that one GPU sends, and receives at the same time."""

    name: str
    kind: str  # "nvlink", "pcie" or "net"
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs of a run: nodes of equally many, every GPU with a network port of its own."""

    num_gpus: int
    per_node: int
    intra: Link
    inter: Link


def intra_link(card: Card, name: str = "") -> Link:
    """The link within a node: `nvlink` or `pcie`; what the card has where none is named.

    UsageError for another name, or NVLink where the card has none.
    """
    name = name or ("nvlink" if card.nvlink else "pcie")
    if name == "pcie":
        return Link(name, "pcie", card.pcie / 2 * _PCIE)
    if name != "nvlink":
        raise UsageError(f"--intra-node: {name!r} is no link within a node", hint="known: nvlink, pcie")
    if card.nvlink is None:
        raise UsageError(f"--intra-node nvlink: {card.key} has no NVLink", hint="write  --intra-node pcie")
    part = next(fraction for least, fraction in _NVLINK if card.capability >= least)
    return Link(name, "nvlink", card.nvlink / 2 * part)


def inter_link(name: str) -> Link:
    """The network: `ib-400`, `roce-200`, `eth-100`: Gbit/s of the port that each GPU has. UsageError for anything else."""
    match = _PORTS.fullmatch(name.strip().lower())
    if match is None or int(match[2]) < 1:
        hint = "write the port's speed in Gbit/s for each GPU:  ib-400, roce-200, eth-100"
        raise UsageError(f"--inter-node: {name!r} is no network", hint=hint)
    return Link(match[0], "net", int(match[2]) * 1e9 / 8 * _NET)


HOST_MEMORY = (
    2 * 204.8e9
)  # bytes a second of a node: two sockets of eight channels DDR4-3200 (AMD EPYC 7742; DGX A100 user guide)


def host_bandwidth(card: Card) -> float:
    """Bytes a second between the GPU and the host's pinned memory, one direction.

    26.3 GB/s of 32 over PCIe 4 and 51 of 64 over PCIe 5 (Azure/AI-benchmarking-guide, ND_A100_v4 and ND_H100_v5, nvbandwidth).
    """
    return card.pcie / 2 * (26.28 / 32)
