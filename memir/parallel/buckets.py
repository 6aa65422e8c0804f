"""Flat buckets: which tensors share one, in the order in which they come."""

from __future__ import annotations

from collections.abc import Sequence

from memir.errors import InconclusiveError
from memir.ir.size import Size


def assigned(sizes: Sequence[tuple[str, Size]], limits: Sequence[int]) -> list[list[int]]:
    """Buckets of the (dtype, bytes) in order, each as positions: one a dtype is open, and full once it has reached its limit.

    The k-th full bucket of a dtype had `limits[k]`, the last limit holds for all further ones
    (torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size`). Full buckets come first in the order in
    which they fill up, then those that are still open.
    InconclusiveError for bytes that are not numbers.
    """
    full: list[list[int]] = []
    opened: dict[str, tuple[list[int], int]] = {}
    filled: dict[str, int] = {}
    for place, (dtype, size) in enumerate(sizes):
        if not size.is_constant:
            raise InconclusiveError(f"a tensor of {size} bytes goes into a bucket: that must be a number")
        members, nbytes = opened.pop(dtype, ([], 0))
        members.append(place)
        nbytes += size.constant
        number = filled.get(dtype, 0)
        if nbytes >= limits[min(number, len(limits) - 1)]:
            full.append(members)
            filled[dtype] = number + 1
        else:
            opened[dtype] = members, nbytes
    return full + [members for members, _ in opened.values()]
