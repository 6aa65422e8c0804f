"""`python -m benchmarks.llmem_table3.chunks`: unused ends of Gemini's chunks in cells that the paper prints as out of memory.

ColossalAI packs parameters in the order of the model into chunks of one size. Of the sizes from 32 Mi elements on, or from the
largest parameter, it takes that which leaves least unused; parameters beyond mean + 3 deviations have chunks of their own
(colossalai/zero/gemini/chunk/search_utils.py, `search_chunk_configuration`, with its plugin's defaults). Sizes are tried in
steps of 64 Ki elements here and 1 Ki there.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

MI = 2**20
STEP = 2**16
GIB = 2**30
OPT = [50272 * 2560, 2050 * 2560, 2560, 2560]
OPT += 32 * [*4 * [2560 * 2560, 2560], 2560, 2560, 4 * 2560 * 2560, 4 * 2560, 4 * 2560 * 2560, 2560, 2560, 2560]
CODEGEN = [51200 * 2560]
CODEGEN += 32 * [2560, 2560, 3 * 2560 * 2560, 2560 * 2560, 4 * 2560 * 2560, 4 * 2560, 4 * 2560 * 2560, 2560]
CODEGEN += [2560, 2560, 51200 * 2560, 51200]
_BLOOM_LAYER = [2560, 2560, 3 * 2560 * 1280, 3 * 1280, 2560 * 1280, 2560, 2560, 2560, 4 * 2560 * 1280, 4 * 1280]
BLOOM = [250880 * 1280, 2560, 2560, *30 * [*_BLOOM_LAYER, 4 * 2560 * 1280, 2560], 2560, 2560]  # one of two ranks
CELLS = (("OPT-2.7b llmem-adp", OPT), ("bloom-3b llmem-dptp", BLOOM), ("codegen-2B-nl llmem-adp", CODEGEN))


def unused(parameters: Sequence[int]) -> tuple[int, int]:
    """(elements of a chunk, elements at the ends of chunks that nothing is in) for these numbers of elements."""
    limit = fmean(parameters) + 3 * pstdev(parameters)
    packed = [numel for numel in parameters if numel <= limit]
    start = max(32 * MI, max(packed))
    best = min(range(start, start + 32 * MI + 1, STEP), key=lambda size: _left(packed, size))
    return best, _left(packed, best)


def _left(packed: Sequence[int], size: int) -> int:
    total = left = 0
    for numel in packed:
        if numel > left:
            total, left = total + left, size
        left -= numel
    return total + left


def main() -> None:
    """Bytes at 2 for fp16, which every copy has whole, and a share of 4 for the fp32 copy."""
    for name, parameters in CELLS:
        size, ends = unused(parameters)
        share = 2 if name.startswith("bloom") else 4  # copies
        nbytes = ends * (2 + 4 / share)
        print(f"{name}: chunks of {size / MI:.1f} Mi elements, {ends:,} unused, {nbytes / GIB:.2f} GiB on a rank")


if __name__ == "__main__":
    main()
