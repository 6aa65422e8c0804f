"""The largest batch or sequence that fits a GPU, over all programs of a recipe: `sizes` solves each, here they are joined."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memir.hardware import Gpu
from memir.sweep.grid import Numbers, Point
from memir.sweep.pool import Pool
from memir.sweep.sizes import FAR, Sizes


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest `symbol` ("B" or "S") that fits while the other one is `at`.

    `value` is that size and `numbers` are its bytes; None: nothing fits, or nothing is known, which `reason` says. `over_at` is
    the next size, which does not fit, `over` its bytes, and `formula` the piece of the peak that is too much there; None where
    not the memory ends it but `limit`, or where larger ones are not known, which `reason` says.
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
        point = _point(symbol, wanted, at)
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
        wanted = part.value + 1
        other = next((p.sizes for p in parts if p.sizes.is_valid(wanted)), None)
        if other is not None:  # it does not fit there, or its part would be the largest
            return _beyond(answer, other, wanted)
        if part.next is not None:  # the domain leaves out the sizes between: another program may hold there
            known = len(pool.holdings)
            reasons = pool.assign([_point(symbol, size, at) for size in range(wanted, part.next)])[1]
            if len(pool.holdings) > known:
                continue
            between = f"{symbol}={wanted} to {part.next - 1} are not known: {next(iter(reasons.values()))}"
            return _beyond(replace(answer, reason=between), part.sizes, part.next)
        limit = pool.refuses(wanted) if symbol == "S" else ""
        if part.value >= FAR:
            limit = f"nothing: {symbol} does not matter"
        if limit:
            return replace(answer, limit=limit)
        if wanted in asked:
            return replace(answer, reason=f"beyond {symbol}={part.value} nothing is known: {reason}")


def _point(symbol: str, size: int, at: int) -> Point:
    return (size, at) if symbol == "B" else (at, size)


def _beyond(answer: Largest, sizes: Sizes, over_at: int) -> Largest:
    """The answer with the bytes at a size that does not fit, of the program that holds there."""
    return replace(answer, over_at=over_at, over=sizes.numbers(over_at), formula=sizes.formula(over_at))
