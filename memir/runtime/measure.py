"""What a real training step takes, by the allocator's own accounting: the truth that predictions are judged by.

On the CPU the allocator reports every allocation and free to the profiler, with its own running total
(c10/core/CPUAllocator.cpp, ProfiledCPUMemoryReporter); sizes are those requested, without rounding. It knows only blocks
that were allocated while the profiler ran, so the profiler starts before the model exists, and a process should measure once.
On CUDA the caching allocator keeps the same three figures itself (`torch.cuda.memory_stats`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from memir.errors import InconclusiveError

STEPS = 3  # the first makes the optimizer's state, the second shows what one step leaves for the next, the third is reported
_MARK = "memir measured step"

BuildStep = Callable[[], Callable[[], object]]  # makes model, optimizer and batch; returns the function that runs one step


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One allocation (`delta` > 0) or free (`delta` < 0) in bytes, and the running total after it."""

    delta: int
    total: int
    block: int  # number of the allocation, in order, since the profiler started; -1: allocated before it
    ops: tuple[str, ...]  # the profiler's operators around it, outermost first; () when Python freed it
    calls: tuple[int, ...]  # the same as numbers: two events inside one call of an operator share its number

    @property
    def op(self) -> str:
        """The innermost ATen operator that allocated or freed, or the innermost of any kind, or `""` (freed by Python)."""
        return next((name for name in reversed(self.ops) if name.startswith("aten::")), self.ops[-1] if self.ops else "")


@dataclass(frozen=True, slots=True)
class Measured:
    """Absolute bytes of one step: live at its start, at most, live at its end.

    `timeline` has the step's events in order, `resident` the allocations that are alive at its start (both empty on CUDA).
    `allocated_peak` counts blocks as the allocator rounds them: equal to `peak` on the CPU, max_memory_allocated on CUDA.
    """

    device: str
    at_start: int
    peak: int
    at_end: int
    allocated_peak: int
    timeline: tuple[MemoryEvent, ...] = ()
    resident: tuple[MemoryEvent, ...] = ()

    def peak_event(self) -> MemoryEvent | None:
        """The first event that reaches the peak; None where there is no timeline or the step begins at its peak."""
        return next((event for event in self.timeline if event.total == self.peak), None)


@dataclass(frozen=True, slots=True)
class RawEvent:
    """A memory event as the profiler gives it: time in ns, delta and the allocator's running total in bytes, address."""

    time: int
    delta: int
    total: int
    address: int
    ops: tuple[str, ...] = ()
    calls: tuple[int, ...] = ()


def measure_cpu(build: BuildStep, steps: int = STEPS) -> Measured:
    """Runs `build()` and then its step `steps` times on the CPU; reports the last step.

    Counted is what this thread allocates, and autograd's and PyTorch's own threads on its behalf: a model that allocates in
    threads of its own is beyond the profiler.
    InconclusiveError when the profiler's events do not add up to the allocator's own running totals (an event is missing or
    was reported out of order), so that a figure is never silently wrong.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        step = build()
        for number in range(steps):
            with record_function(_MARK if number == steps - 1 else f"step {number}"):
                step()
    results = prof.profiler.kineto_results
    start, end = 0, 0
    raw: list[RawEvent] = []
    for event, ops, calls in _walk(results.experimental_event_tree()):
        if event.name == _MARK:
            start, end = event.start_time_ns, event.end_time_ns
        elif event.name == "[memory]":
            fields = event.extra_fields
            raw.append(RawEvent(event.start_time_ns, fields.alloc_size, fields.total_allocated, fields.ptr, ops, calls))
    if not end:
        raise InconclusiveError("the profiler did not record the step", hint="is another profiler active in this process?")
    return cut_step(raw, start, end)


def _walk(roots: Iterable[Any]) -> Iterator[tuple[Any, tuple[str, ...], tuple[int, ...]]]:
    """Every event of the profiler's trees in pre-order, with the names and numbers of the operators it lies in."""
    stack: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = [(event, (), ()) for event in reversed(list(roots))]
    count = 0
    while stack:
        event, ops, calls = stack.pop()
        yield event, ops, calls
        if event.name != _MARK:
            ops, calls = (*ops, event.name), (*calls, count)
            count += 1
        stack += [(child, ops, calls) for child in reversed(event.children)]


def cut_step(raw: Sequence[RawEvent], start: int, end: int) -> Measured:
    """The step between the times `start` and `end` (ns) out of a whole run's events, checked against the running totals."""
    events = in_order(raw)
    alive: dict[int, MemoryEvent] = {}  # by address
    base = events[0].total - events[0].delta if events else 0
    at_start = 0
    resident: tuple[MemoryEvent, ...] | None = None
    timeline: list[MemoryEvent] = []
    for number, event in enumerate(events):
        if event.time > end:
            break
        if resident is None and event.time >= start:
            resident = tuple(alive.values())
        made = alive.pop(event.address, None) if event.delta < 0 else None
        block = number if event.delta > 0 else made.block if made else -1
        seen = MemoryEvent(event.delta, event.total - base, block, event.ops, event.calls)
        if event.delta > 0:
            alive[event.address] = seen
        if resident is None:
            at_start = seen.total
        else:
            timeline.append(seen)
    peak = max([at_start, *(event.total for event in timeline)])
    at_end = timeline[-1].total if timeline else at_start
    return Measured(
        "cpu", at_start, peak, at_end, peak, tuple(timeline), tuple(alive.values()) if resident is None else resident
    )


def in_order(raw: Iterable[RawEvent]) -> list[RawEvent]:
    """Events by time; those of one nanosecond in the order in which the allocator's running total says that they happened.

    InconclusiveError when no order of them adds up.
    """
    events = sorted(raw, key=lambda event: event.time)  # stable
    for place in range(1, len(events)):
        before = events[place - 1].total
        follows = place
        while events[follows].total != before + events[follows].delta:
            follows += 1
            if follows == len(events) or events[follows].time != events[place].time:
                event = events[place]
                raise InconclusiveError(
                    "the profiler's memory events do not add up to the allocator's running total",
                    where=f"event {place} of {len(events)}, {event.delta:+,} bytes in {'/'.join(event.ops) or 'Python'}",
                    hint="another thread allocated, or the profiler dropped events: run again",
                )
        events.insert(place, events.pop(follows))
    return events


def measure_cuda(build: BuildStep, steps: int = STEPS, cuda: Any = torch.cuda) -> Measured:
    """The same on the current CUDA device, from the caching allocator's counters.

    `at_start`, `peak` and `at_end` are requested bytes (`requested_bytes.all.*` of torch.cuda.memory_stats, before rounding to
    512 bytes), `allocated_peak` is `max_memory_allocated`. What the process had allocated before `build` is not counted.
    InconclusiveError without a device.
    """
    if not cuda.is_available():
        raise InconclusiveError("no CUDA device here", hint="memir verify --target cpu  runs the step on the CPU")
    gc.collect()
    cuda.synchronize()
    base = cuda.memory_stats()["requested_bytes.all.current"]
    base_allocated = cuda.memory_allocated()
    step = build()
    for _ in range(steps - 1):
        step()
    cuda.synchronize()
    at_start = cuda.memory_stats()["requested_bytes.all.current"]
    cuda.reset_peak_memory_stats()
    step()
    cuda.synchronize()
    stats = cuda.memory_stats()
    return Measured(
        device="cuda",
        at_start=at_start - base,
        peak=stats["requested_bytes.all.peak"] - base,
        at_end=stats["requested_bytes.all.current"] - base,
        allocated_peak=cuda.max_memory_allocated() - base_allocated,
    )
