"""How long a collective takes: alpha + bytes / bandwidth, by the best of NCCL's algorithms and protocols.

The model is NCCL's own, by which it chooses (github.com/NVIDIA/nccl, src/graph/tuning.cc at 01afd20, `ncclTopoTuneModel` and
`ncclTopoGetAlgoTime`): `baseLat` and `hwLat` in microseconds, ring and tree, the protocols LL, LL128 and Simple. What is left
out: CollNet and NVLink SHARP, NCCL's corrections and caps for trees. All-to-all is not in that model: every rank sends its
parts to all others at once, at the speed of the link and, for those on other nodes, of its network port.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2

from memir.hardware.links import Cluster

# microseconds: LL, LL128, Simple
_BASE = {"ring": (3.6, 10.0, 8.4), "tree": (4.4, 4.4, 0.0)}
_HOP = {
    "nvlink": {"ring": (0.47, 1.9, 3.4), "tree": (0.52, 1.2, 28.0)},
    "pcie": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 28.0)},
    "net": {"ring": (2.7, 4.0, 9.6), "tree": (5.0, 8.5, 50.0)},
}
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_LL = {"all_reduce": 1 / 4, "all_gather": 1 / 3, "reduce_scatter": 1 / 3}  # of the bandwidth; within a node
_LL128 = 0.92
_A100_CAP = 235e9  # bytes a second: "busBw = min(busBw, 235)" for compute capability 8.0
KINDS = (*_STEPS, "all_to_all", "send")


@lru_cache(maxsize=1 << 16)
def collective_seconds(kind: str, nbytes: int, ranks: int, stride: int, cluster: Cluster) -> float:
    """Seconds of a collective over `ranks` GPUs, each `stride` after the one before.

    `nbytes`: of the whole tensor, that every rank has after an all_gather or before a reduce_scatter, of an all_reduce's or
    all_to_all's tensor on one rank, or of what is sent.
    """
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    here = max(1, min(ranks, cluster.per_node // stride)) if stride < cluster.per_node else 1
    nodes = -(-ranks // here)
    if kind == "send":
        link = cluster.intra if stride < cluster.per_node else cluster.inter
        return (_BASE["ring"][2] + _HOP[link.kind]["ring"][2]) * 1e-6 + nbytes / link.bandwidth
    if kind == "all_to_all":
        return _all_to_all(nbytes, ranks, here, cluster)
    intra = cluster.intra.bandwidth
    if cluster.intra.kind == "nvlink" and 235e9 < intra <= 240e9:
        intra = _A100_CAP
    bus = intra if nodes == 1 else cluster.inter.bandwidth * here if here == 1 else min(intra, cluster.inter.bandwidth * here)
    factor = _STEPS[kind]
    best = float("inf")
    for protocol in range(3):
        part = (_LL[kind] if nodes == 1 else 1 / 4, _LL128, 1.0)[protocol]
        if protocol == 1 and cluster.intra.kind != "nvlink":
            continue
        steps = factor * (ranks - 1)
        outside = factor * (nodes - 1)
        waited = _BASE["ring"][protocol] + (steps - outside) * _HOP[cluster.intra.kind]["ring"][protocol]
        waited += outside * _HOP["net"]["ring"][protocol]
        best = min(best, waited * 1e-6 + nbytes * factor * (ranks - 1) / ranks / (bus * part))
        if kind == "all_reduce":
            waited = _BASE["tree"][protocol] + 2 * (here - 1) * _HOP[cluster.intra.kind]["tree"][protocol]
            waited += 2 * log2(nodes) * _HOP["net"]["tree"][protocol]
            tree = bus * 0.9 * (1 / 3.8, _LL128, 1.0)[protocol]
            best = min(best, waited * 1e-6 + 2 * nbytes / tree)
    return best


def _all_to_all(nbytes: int, ranks: int, here: int, cluster: Cluster) -> float:
    base = _BASE["ring"][2] + _HOP[cluster.intra.kind]["ring"][2]
    inside = nbytes * (here - 1) / ranks / cluster.intra.bandwidth
    if ranks == here:
        return base * 1e-6 + inside
    outside = nbytes * (ranks - here) / ranks / cluster.inter.bandwidth
    return (base + _HOP["net"]["ring"][2]) * 1e-6 + max(inside, outside)
