"""What a GPU holds beside the storages of the step that is traced: each term by name, with its source. All in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes with a reason."""

    name: str
    nbytes: int


def cublas_workspaces() -> Term:
    """One workspace for each cuBLAS handle: the main thread's and that of autograd's thread.

    aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize` (of PyTorch 2.4): :4096:2:16:8 unless
    CUBLAS_WORKSPACE_CONFIG says otherwise, so 2 buffers of 4096 KiB and 8 of 16 KiB.
    """
    one = (2 * 4096 + 8 * 16) * 1024
    return Term("cuBLAS workspaces, 2 x 8,519,680", 2 * one)


def attention_mask(batch: int, seq: int) -> Term:
    """The int64 mask [B, S] that the Trainer's batch has beside ids and labels.

    flash-attn 2 looks at it and builds nothing from it; memir's plain loop does not pass one.
    """
    return Term("attention_mask of the batch, int64 [B, S]", 8 * batch * seq)


def no_mask(seq: int) -> Term:
    """The causal mask [S, S + 1] in bf16 that transformers 4.48 builds for sdpa with a window, and not for flash-attn 2.

    transformers/models/mistral/modeling_mistral.py, `_update_causal_mask`: without a given mask it is one column longer than S.
    """
    return Term("no 4-D mask with flash-attn 2", -2 * seq * (seq + 1))


def unsplit(nbytes: int) -> int:
    """What a block of the caching allocator has beyond a request of over 10 MiB, where it is not worth splitting off.

    c10/cuda/CUDACachingAllocator.cpp: `get_allocation_size` takes such requests from the device in multiples of 2 MiB
    (kRoundLarge), and `should_split` keeps a remainder of up to 1 MiB (kSmallSize) in the block, where the statistics count it.
    A block that is reused after another size was freed may have another remainder: this is a fresh one's.
    """
    request = -(-nbytes // 512) * 512
    if request < 10 * MIB:
        return 0
    remainder = -request % (2 * MIB)
    return remainder if remainder <= MIB else 0


def unsplit_blocks(live: Iterable[int]) -> Term:
    """The remainders of all storages that are alive at once; `live` has their sizes."""
    remainders = [rest for rest in map(unsplit, live) if rest]
    return Term(f"rest of {len(remainders)} blocks that the allocator does not split", sum(remainders))
