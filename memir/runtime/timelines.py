"""Where a predicted and a measured timeline part: allocations aligned by size, then their live ranges compared.

A predicted timeline is a program at numbers for its dims, a measured one the allocator's events (`memir.runtime.measure`).
The two see the same sequence of allocations but for two things: kernels' workspaces, which only the allocator sees, and what
memir got wrong, which is what this module is for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memir.analysis.liveness import flatten
from memir.analysis.liveness import timeline as liveness
from memir.ir.core import Op, Program
from memir.runtime.measure import Measured, MemoryEvent

_END = 1 << 60  # the time of what is not freed in the step
SCALAR = 64  # bytes; Python numbers become tensors of 8 bytes for the length of an operator


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation of either side. `made` and `freed` count that side's events; -1 is before the step, _END after it."""

    nbytes: int
    made: int
    freed: int
    what: str  # the operator, with module and source line on the predicted side
    freed_by: str
    names: frozenset[str] = frozenset()  # operators it is made in, as `aten.add`
    workspace: bool = False  # made and freed inside one call of an operator


@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes that only one side has at its peak, or a live range that differs; `predicted` and `measured` say where."""

    nbytes: int
    count: int
    predicted: str
    measured: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two timelines relate. `at_peak` is what one side's peak has and the other's has not, the largest first."""

    num_predicted: int
    num_measured: int
    num_matched: int
    num_workspaces: int  # measured allocations that a kernel made and freed within one operator
    first: str  # the first difference in the order of events, one line for each side; empty where there is none
    at_peak: tuple[Extra, ...]


def compare(program: Program, env: Mapping[str, int], measured: Measured) -> Comparison:
    """Aligns the program's allocations at `env` with the measured ones."""
    predicted, peak_at = predicted_blocks(program, env)
    blocks = measured_blocks(measured, {_packet(op.opcode) for _, op in flatten(program).ops()})
    pairs = align(predicted, blocks)
    measured_peak = next((i for i, e in enumerate(measured.timeline) if e.total == measured.peak), -1)
    return Comparison(
        len(predicted),
        len(blocks),
        len(pairs),
        sum(b.workspace for b in blocks),
        first_difference(predicted, blocks, pairs),
        tuple(_at_peak(predicted, peak_at, blocks, measured_peak, pairs)),
    )


def predicted_blocks(program: Program, env: Mapping[str, int]) -> tuple[list[Block], int]:
    """The program's allocations at `env` in order, and the number of the operator in which the peak is (-1: the start).

    An operator is one event: it allocates at 2 * number and frees at 2 * number + 1.
    """
    line = liveness(program)
    numbers = line.evaluate(env)
    size = {s.name: s.nbytes.evaluate(env) for s in program.storages}
    made = {s.name: (-1, f"{s.kind} {s.of or s.name}", "") for s in program.storages if s.live_in}
    freed: dict[str, tuple[int, str]] = {}
    for number, step in enumerate(line.steps):
        for name in step.allocates:
            made[name] = (2 * number, _place(step.op), _packet(step.op.opcode))
        for name in step.frees:
            freed[name] = (2 * number + 1, _place(step.op))
    blocks = []
    for name, (when, what, packet) in sorted(made.items(), key=lambda item: item[1][0]):
        if size[name]:
            end, by = freed.get(name, (_END, "the end of the step"))
            blocks.append(Block(size[name], when, end, what, by, frozenset([packet])))
    peak_at = numbers.running.index(numbers.peak) if numbers.peak in numbers.running else -1
    return blocks, 2 * peak_at if peak_at >= 0 else -1


def _packet(opcode: str) -> str:
    """An operator without its overload: `aten.add` of `aten.add.Tensor`."""
    return ".".join(opcode.split(".")[:2])


def _place(op: Op) -> str:
    return "  ".join(filter(None, (op.opcode, op.path, op.source)))


def measured_blocks(measured: Measured, opcodes: Container[str]) -> list[Block]:
    """The allocations that the step begins with or makes, in order; an event's number is its place in the timeline.

    A block that is made and freed inside one call of an operator that the program has (`opcodes`) is that kernel's workspace.
    """
    made = {e.block: (-1, e) for e in measured.resident}
    freed: dict[int, tuple[int, MemoryEvent]] = {}
    for number, event in enumerate(measured.timeline):
        if event.delta > 0:
            made[event.block] = (number, event)
        else:
            freed[event.block] = (number, event)
    blocks = []
    for block, (when, event) in made.items():
        end, by = freed.get(block, (_END, None))
        inside = by is not None and when >= 0 and bool(_known_calls(event, opcodes) & _known_calls(by, opcodes))
        names = frozenset(name.replace("::", ".") for name in event.ops if name.startswith("aten::"))
        freed_by = (by.op or "Python") if by is not None else "the end of the step"
        blocks.append(Block(event.delta, when, end, event.op, freed_by, names, inside))
    return blocks


def _known_calls(event: MemoryEvent, opcodes: Container[str]) -> set[int]:
    """Numbers of the calls around an event whose operator the program has."""
    names = zip(event.ops, event.calls, strict=True)
    return {call for name, call in names if name.startswith("aten::") and name.replace("::", ".") in opcodes}


def align(predicted: Sequence[Block], measured: Sequence[Block]) -> list[tuple[int, int]]:
    """Pairs of places of blocks that are the same allocation: residents by size and end, the others by the order of sizes.

    Scalars and workspaces are left out: an elementwise operator with a Python number makes a tensor of 8 bytes for it.
    """
    left = [i for i, b in enumerate(predicted) if b.made >= 0 and b.nbytes > SCALAR]
    right = [i for i, b in enumerate(measured) if b.made >= 0 and b.nbytes > SCALAR and not b.workspace]

    def same_size(i: int, j: int) -> bool:
        return predicted[left[i]].nbytes == measured[right[j]].nbytes

    def same_operator(i: int, j: int) -> bool:
        return same_size(i, j) and bool(predicted[left[i]].names & measured[right[j]].names)

    sure = common_subsequence(range(len(left)), range(len(right)), same_operator)
    pairs = _pair_residents(predicted, measured)
    for (i, j), (next_i, next_j) in pairwise([(-1, -1), *sure, (len(left), len(right))]):
        between = common_subsequence(range(i + 1, next_i), range(j + 1, next_j), same_size)
        pairs += [(left[x], right[y]) for x, y in [*between, (next_i, next_j)] if x < len(left)]
    return pairs


def common_subsequence(a: Sequence[int], b: Sequence[int], same: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """A longest common subsequence of `a` and `b` as pairs: E. Myers, An O(ND) Difference Algorithm (1986), section 2."""
    reach = {1: 0}  # diagonal -> the furthest place in `a` with so many differences
    history: list[dict[int, int]] = []
    for differences in range(len(a) + len(b) + 1):
        history.append(reach.copy())
        for k in range(-differences, differences + 1, 2):
            down = k == -differences or (k != differences and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            while x < len(a) and x - k < len(b) and same(a[x], b[x - k]):
                x += 1
            reach[k] = x
            if x >= len(a) and x - k >= len(b):
                return [(a[i], b[j]) for i, j in _walk_back(history, len(a), len(b))]
    return []


def _walk_back(history: Sequence[Mapping[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for differences in range(len(history) - 1, -1, -1):
        reach, k = history[differences], x - y
        down = k == -differences or (k != differences and reach[k - 1] < reach[k + 1])
        before = k + 1 if down else k - 1
        to_x = reach[before] if differences else 0
        to_y = to_x - before if differences else 0
        while x > to_x and y > to_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = to_x, to_y
    return pairs[::-1]


def _pair_residents(predicted: Sequence[Block], measured: Sequence[Block]) -> list[tuple[int, int]]:
    def by_size(blocks: Sequence[Block]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for i in sorted((i for i, b in enumerate(blocks) if b.made < 0), key=lambda i: blocks[i].freed):
            found[blocks[i].nbytes].append(i)
        return found

    other = by_size(measured)
    return [pair for nbytes, places in by_size(predicted).items() for pair in zip(places, other.get(nbytes, ()), strict=False)]


def first_difference(predicted: Sequence[Block], measured: Sequence[Block], pairs: Sequence[tuple[int, int]]) -> str:
    """The earliest event that the two sides do not share, described; scalars and workspaces are not told."""
    order = sorted(pairs, key=lambda pair: measured[pair[1]].made)
    found: list[tuple[int, int, str]] = []  # (time in matched allocations, rank, text)
    clock_p = _clock([predicted[p].made for p, _ in order])
    clock_m = _clock([measured[m].made for _, m in order])
    paired_p, paired_m = {p for p, _ in pairs}, {m for _, m in pairs}
    for i, block in enumerate(predicted):
        if i not in paired_p and block.nbytes > SCALAR:
            text = (
                f"predicted only: {block.nbytes:,} bytes at {block.what}"
                if block.made >= 0
                else _resident_only("predicted", block)
            )
            found.append((clock_p(block.made), 0, text))
    for i, block in enumerate(measured):
        if i not in paired_m and block.nbytes > SCALAR and not block.workspace:
            text = (
                f"measured only: {block.nbytes:,} bytes at {block.what}"
                if block.made >= 0
                else _resident_only("measured", block)
            )
            found.append((clock_m(block.made), 1, text))
    for p, m in order:
        a, b = predicted[p], measured[m]
        ends = clock_p(a.freed), clock_m(b.freed)
        if ends[0] != ends[1] and a.nbytes > SCALAR:
            text = (
                f"the {a.nbytes:,} bytes of  {a.what}  (measured at {b.what})\n"
                f"are freed  predicted: {a.freed_by}\n           measured:  {b.freed_by}"
            )
            found.append((min(ends), 2, text))
    return min(found, default=(0, 0, ""))[2]


def _resident_only(side: str, block: Block) -> str:
    return f"{side} only, alive before the step: {block.nbytes:,} bytes, {block.what}"


def _clock(times: Sequence[int]) -> _Clock:
    return _Clock(sorted(time for time in times if time >= 0))


class _Clock:
    """Time in allocations that both sides have: how many of them happened before an event."""

    def __init__(self, times: Sequence[int]) -> None:
        self.times = times

    def __call__(self, when: int) -> int:
        return -1 if when < 0 else _END if when >= _END else bisect_left(self.times, when)


def _at_peak(
    predicted: Sequence[Block], peak_p: int, measured: Sequence[Block], peak_m: int, pairs: Sequence[tuple[int, int]]
) -> Iterable[Extra]:
    """Blocks alive at one side's peak without an alive counterpart at the other's, grouped; predicted bytes count positive."""
    live_p = {i for i, b in enumerate(predicted) if b.made <= peak_p < b.freed}
    live_m = {i for i, b in enumerate(measured) if b.made <= peak_m < b.freed}
    to_m = dict(pairs)
    to_p = {m: p for p, m in pairs}
    total: dict[tuple[str, str], tuple[int, int]] = {}

    def add(nbytes: int, predicted_at: str, measured_at: str) -> None:
        before = total.get((predicted_at, measured_at), (0, 0))
        total[predicted_at, measured_at] = (before[0] + nbytes, before[1] + 1)

    for i in sorted(live_p):
        if to_m.get(i) not in live_m:
            other = measured[to_m[i]] if i in to_m else None
            add(predicted[i].nbytes, predicted[i].what, f"not alive there ({other.what})" if other else "")
    for i in sorted(live_m):
        if to_p.get(i) not in live_p:
            block, other = measured[i], predicted[to_p[i]] if i in to_p else None
            add(
                -block.nbytes,
                f"not alive there ({other.what})" if other else "",
                block.what + (" (workspace)" if block.workspace else ""),
            )
    extras = [Extra(nbytes, count, p, m) for (p, m), (nbytes, count) in total.items()]
    return sorted(extras, key=lambda e: (-abs(e.nbytes), e.predicted, e.measured))
