"""What NCCL takes of a GPU's memory for its own: a buffer for each connection, channel and protocol of every communicator.

Outside of PyTorch's allocator. How many connections there are depends on topology and on the algorithms that NCCL chooses, so
it is a range: the least is a ring of two channels that uses one protocol, the most are rings and trees on all channels with all
protocols (NVIDIA/nccl issue 864 has a communicator of 1.6 GB; its maintainers: linear in the channels, a ring has two
connections regardless of the scale, more communicators take more).
"""

from __future__ import annotations

MIB = 2**20
STEPS = 8  # NCCL_STEPS, src/include/device.h
SIMPLE = 4 * MIB  # bytes of a connection's buffer: NCCL_BUFFSIZE's default (user guide, environment variables)
LOW_LATENCY = 8 * 512 * STEPS * 16  # src/init.cc, DEFAULT_LL_BUFFSIZE: lines a thread, threads, steps, bytes of a line
LOW_LATENCY_128 = 120 * 640 * STEPS * 8  # src/init.cc, DEFAULT_LL128_BUFFSIZE: elements a thread, threads, steps, bytes
CHANNELS = (2, 32)  # src/graph/search.cc doubles a single ring; MAXCHANNELS, src/include/device.h, until 2.22
RING, TREE = 1, 4  # buffers that a rank receives into: from the one before; from three children and a parent


def nccl_buffers(communicators: int) -> tuple[int, int]:
    """The least and the most bytes that so many communicators take on each rank; nothing for none."""
    least = CHANNELS[0] * SIMPLE
    most = CHANNELS[1] * (SIMPLE + LOW_LATENCY + LOW_LATENCY_128) * (RING + TREE)
    return communicators * least, communicators * most
