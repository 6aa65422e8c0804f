"""How long a matrix product takes: tiles on the SMs, in waves.

The result is cut into tiles, each computed by one SM; the SMs work in waves, and the last wave takes as long as a full one
("tile and wave quantization", NVIDIA, Matrix Multiplication Background User's Guide, with the tiles that cuBLAS has). A tile
takes its operations at an SM's share of the sustained rate, or as long as its operands need from L2, and is then written out.
Long sums over few tiles are split ("split-K"), their parts added in fp32. The library is taken to choose the best. Nothing of
the whole may be faster than the memory moves its operands.

Against published products of an A100 (`tests/test_cost_kernels.py`): within 8 % at six of eight shapes.
"""

from __future__ import annotations

from functools import lru_cache

from memir.analysis.cost.device import Device
from memir.ir.dtypes import ITEMSIZE

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_SINGLE = (*TILES, (128, 32), (32, 128), (32, 32))  # outside of tensor cores: kernels as ampere_sgemm_128x32, 32x128, 32x32
_SPLITS = (1, 2, 4, 8, 16, 32)
_LEAST_SUM = 256  # of a part of a split sum


@lru_cache(maxsize=1 << 16)
def product_seconds(batch: int, m: int, n: int, k: int, dtype: str, device: Device) -> float:
    """Seconds of `batch` products [m, k] x [k, n], without the launch."""
    size = ITEMSIZE[dtype]
    moved = size * batch * (m * k + k * n + m * n) / device.bandwidth
    if min(batch, m, n, k) < 1:
        return 0.0
    each = device.rate(dtype) / device.sms
    out = device.bandwidth / device.sms
    intensity = device.intensity * device.rate(dtype) / device.half
    best = float("inf")
    for tall, wide in TILES if size == 2 else _SINGLE:
        tiles = batch * -(-m // tall) * -(-n // wide)
        slow = max(1.0, intensity / (2 * tall * wide / (size * (tall + wide))))
        for split in _SPLITS:
            part = -(-k // split)
            if split > 1 and (part < _LEAST_SUM or tiles >= 2 * device.sms):
                break
            waves = -(-tiles * split // device.sms)
            one = 2 * tall * wide * part / each * slow + tall * wide * (size if split == 1 else 4) / out
            added = 0.0 if split == 1 else batch * m * n * (4 * split + size) / device.bandwidth
            best = min(best, waves * one + added)
    return max(best, moved)
