"""How long a fused attention kernel takes: the operations it needs at the rate that FlashAttention-2 was measured to reach.

Decoders attend to what came before, so where no mask is an operand and there are as many keys as queries half of the scores are
needed; other lengths are a ring's turns, where a rank attends to all keys of another one. On the diagonal a tile of 128
keys is computed in full (flash_fwd_kernel.h, `kBlockN`), which makes short sequences slower: S + 128 in the place of S.
"""

from __future__ import annotations

from memir.analysis.cost.device import BACKWARD_OF_FLASH, Device

TILE = 128
_UNFUSED = 0.325 / (
    184 / 312
)  # of flash, by the kernel of FlashAttention's first version: 25 to 40 % (arXiv 2307.08691, abstract)


def attention_seconds(form: str, opcode: str, masked: bool, flops: int, rows: int, columns: int, device: Device) -> float:
    """Seconds of a kernel with `flops` operations when all scores are computed. `form`: forward or backward."""
    whole = masked or rows != columns
    rate = device.flash if whole else device.flash_causal
    if "efficient" in opcode:
        rate *= _UNFUSED
    if form == "backward":
        rate *= BACKWARD_OF_FLASH
    if whole:
        return flops / rate
    return flops / 2 * (1 + TILE / max(rows, columns)) / rate
