"""The largest batch or sequence that fits a GPU, over all programs of a recipe: `sizes` solves each, here they are joined."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memir.hardware import Gpu
from memir.sweep.grid import Numbers
from memir.sweep.pool import Pool
from memir.sweep.sizes import FAR, Sizes


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest `symbol` ("B" or "S") that fits while the other one is `at`.

    `value` is that size and `numbers` are its bytes; None: nothing fits, or nothing is known, which `reason` says. `over_at` is
    the next size, which does not fit, `over` its bytes, and `formula` the piece of the peak that is too much there; None where
    not the memory ends it but `limit`.
    """

    variant: int  # position in the list of variants
    symbol: str
    at: int
    value: int | None = None
    numbers: Numbers | None = None
    over_at: int | None = None
    over: Numbers | None = None
    formula: str = ""
    limit: str = ""
    reason: str = ""  # why it is not known or not proven


def largest(pool: Pool, variant: int, symbol: str, at: int, gpu: Gpu) -> Largest:
    """Solve for `symbol` with the other symbol at `at`.

    Allocated bytes decide what fits. Where a program's domain ends before the memory does, the next size is traced, too.
    Errors are those of the pool: UsageError, and InconclusiveError where the first trace fails.
    """
    wanted = 1 if symbol == "B" else pool.default_seq(at)
    asked: set[int] = set()
    while True:
        point = (wanted, at) if symbol == "B" else (at, wanted)
        reason = pool.assign([point])[1].get(point, "")
        if reason and not asked:
            return Largest(variant, symbol, at, reason=reason)
        asked.add(wanted)
        every = [Sizes(holding, symbol, at, gpu.nbytes, pool.max_seq) for holding in pool.holdings]
        every = [sizes for sizes in every if sizes.least is not None]
        doubts = [sizes.doubt for sizes in every if sizes.doubt]
        if doubts or not every:
            return Largest(variant, symbol, at, reason="; ".join(doubts) or "no program holds there")
        parts = [sizes.solve() for sizes in every]
        part = max(parts, key=lambda part: (part.value or 0, -part.least))
        answer = Largest(variant, symbol, at, part.value, None if part.value is None else part.sizes.numbers(part.value))
        if part.value is None:
            if part.least > 1 and part.least - 1 not in asked:
                wanted = part.least - 1
                continue
            return _beyond(answer, part.sizes, part.least)
        if part.next is not None:
            return _beyond(answer, part.sizes, part.next)
        wanted = part.value + 1
        other = next((p.sizes for p in parts if p.sizes.is_valid(wanted)), None)
        if other is not None:  # it does not fit there, or its part would be the largest
            return _beyond(answer, other, wanted)
        limit = reason if wanted in asked else ""
        if symbol == "S" and pool.max_seq is not None and wanted > pool.max_seq:
            limit = pool.limit
        elif part.value >= FAR:
            limit = f"nothing: {symbol} does not matter"
        if limit:
            return replace(answer, limit=limit)


def _beyond(answer: Largest, sizes: Sizes, over_at: int) -> Largest:
    """The answer with the bytes at a size that does not fit, of the program that holds there."""
    return replace(answer, over_at=over_at, over=sizes.numbers(over_at), formula=sizes.formula(over_at))
