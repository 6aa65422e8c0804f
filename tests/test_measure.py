"""Measuring: the step cut out of the allocator's events, their order, CUDA's counters, small steps whose bytes are known."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from memir.errors import InconclusiveError
from memir.runtime.measure import MemoryEvent, RawEvent, cut_step, in_order, measure_cpu, measure_cuda


def events(*deltas: tuple[int, int, int]) -> list[RawEvent]:
    """(time, delta, address) with the running totals that the allocator would give, starting at 1000."""
    total, made = 1000, []
    for time, delta, address in deltas:
        total += delta
        made.append(RawEvent(time, delta, total, address, ("aten::empty",), (time,)))
    return made


def test_the_step_is_cut_out_in_absolute_bytes() -> None:
    raw = events((1, 100, 1), (2, 50, 2), (10, 30, 3), (11, 20, 4), (12, -30, 3), (13, -50, 2), (30, 500, 5))
    found = cut_step(raw, start=10, end=20)
    assert (found.at_start, found.peak, found.at_end) == (150, 200, 120)
    assert [event.delta for event in found.timeline] == [30, 20, -30, -50]
    assert [event.total for event in found.timeline] == [180, 200, 170, 120]
    assert [event.delta for event in found.resident] == [100, 50]
    assert found.allocated_peak == found.peak
    peak = found.peak_event()
    assert peak is not None
    assert peak.delta == 20


def test_a_free_belongs_to_the_last_block_at_its_address() -> None:
    raw = events((1, 8, 1), (2, -8, 1), (10, 16, 1), (11, -16, 1), (12, 4, 1))
    made, freed, again = cut_step(raw, start=10, end=20).timeline
    assert made.block == freed.block
    assert again.block not in (made.block, 0)


def test_a_block_from_before_the_profiler_has_no_number() -> None:
    raw = [RawEvent(10, -64, 0, 7)]
    assert cut_step(raw, start=10, end=20).timeline[0].block == -1


def test_a_step_without_events_stays_where_it_began() -> None:
    found = cut_step(events((1, 100, 1)), start=10, end=20)
    assert (found.at_start, found.peak, found.at_end) == (100, 100, 100)
    assert found.peak_event() is None
    assert [event.delta for event in found.resident] == [100]


def test_events_of_one_nanosecond_are_ordered_by_the_running_total() -> None:
    right = events((1, 100, 1), (2, 40, 2), (2, -100, 1), (2, 7, 3), (3, 1, 4))
    shuffled = [right[0], right[3], right[2], right[1], right[4]]
    assert in_order(shuffled) == right


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_event_is_never_a_silent_number(lost: int) -> None:
    raw = events((1, 100, 1), (2, 40, 2), (3, -100, 1), (4, 9, 3))
    del raw[lost]
    with pytest.raises(InconclusiveError, match="running total"):
        in_order(raw)


def test_the_operator_of_an_event_is_the_innermost_aten_one() -> None:
    def op(*ops: str) -> str:
        return MemoryEvent(1, 1, 0, ops, tuple(range(len(ops)))).op

    assert op("autograd::engine", "MmBackward0", "aten::linear", "aten::mm") == "aten::mm"
    assert op("autograd::engine", "GeLUFunctionBackward") == "GeLUFunctionBackward"
    assert op() == ""


def known() -> Callable[[], object]:
    """1,000 floats are kept; a step makes 256 and 512, drops the first, makes 64."""
    kept = torch.empty(1000)

    def step() -> None:
        assert kept.numel() == 1000
        first = torch.empty(256)
        second = torch.empty(512)
        del first
        third = torch.empty(64)
        del second, third

    return step


def test_bytes_of_a_known_step() -> None:
    found = measure_cpu(known)
    assert (found.at_start, found.peak, found.at_end) == (4000, 4000 + 1024 + 2048, 4000)
    assert [event.delta for event in found.timeline] == [1024, 2048, -1024, 256, -2048, -256]
    assert {event.op for event in found.timeline if event.delta > 0} == {"aten::empty"}
    assert [event.delta for event in found.resident] == [4000]


def test_measuring_again_in_the_same_process_begins_at_zero() -> None:
    held: list[torch.Tensor] = []

    def leaves_something() -> Callable[[], object]:
        return lambda: held.append(torch.empty(100))

    assert measure_cpu(leaves_something).at_end == 1200
    again = measure_cpu(known)
    assert (again.at_start, again.peak, again.at_end) == (4000, 7072, 4000)


def test_odd_sizes_are_not_rounded() -> None:
    def build() -> Callable[[], object]:
        return lambda: torch.empty(3, dtype=torch.uint8).numel()

    assert measure_cpu(build).peak == 3


def training() -> tuple[Callable[[], object], list[object]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50), torch.nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(7, 40)

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, [model, optimizer, x]


def test_live_at_the_start_is_what_python_can_see() -> None:
    """An account of its own: the storages of all tensors that the training keeps, found through the objects."""
    kept: list[object] = []

    def build() -> Callable[[], object]:
        step, objects = training()
        kept.extend(objects)
        return step

    found = measure_cpu(build)
    model, optimizer, x = kept
    assert isinstance(model, torch.nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(x, torch.Tensor)
    tensors = [*model.parameters(), *model.buffers(), x]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert found.at_start == found.at_end == sum(storages.values())
    assert sorted(event.delta for event in found.resident) == sorted(storages.values())


def test_two_runs_measure_the_same() -> None:
    def sizes() -> list[tuple[int, str]]:
        gc.collect()
        return [(event.delta, event.op) for event in measure_cpu(lambda: training()[0]).timeline]

    assert sizes() == sizes()


class FakeCuda:
    """torch.cuda's counters over a pretended caching allocator that rounds to 512 bytes."""

    def __init__(self, available: bool = True) -> None:
        self.available = available
        self.requested = self.allocated = self.requested_peak = self.allocated_peak = 0
        self.synchronized = 0

    def allocate(self, nbytes: int) -> Callable[[], None]:
        rounded = -(-nbytes // 512) * 512
        self._move(nbytes, rounded)
        return lambda: self._move(-nbytes, -rounded)

    def _move(self, nbytes: int, rounded: int) -> None:
        self.requested += nbytes
        self.allocated += rounded
        self.requested_peak = max(self.requested_peak, self.requested)
        self.allocated_peak = max(self.allocated_peak, self.allocated)

    def is_available(self) -> bool:
        return self.available

    def synchronize(self) -> None:
        self.synchronized += 1

    def reset_peak_memory_stats(self) -> None:
        self.requested_peak, self.allocated_peak = self.requested, self.allocated

    def memory_stats(self) -> dict[str, int]:
        return {"requested_bytes.all.current": self.requested, "requested_bytes.all.peak": self.requested_peak}

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.allocated_peak


def test_cuda_reports_the_last_step_without_what_was_there_before() -> None:
    cuda = FakeCuda()
    cuda.allocate(10_000)  # the process held this already

    def build() -> Callable[[], object]:
        cuda.allocate(1000)
        steps = iter((5000, 300, 700))  # the first step's peak must not be reported

        def step() -> None:
            free = cuda.allocate(next(steps))
            inner = cuda.allocate(1)
            inner()
            free()

        return step

    found = measure_cuda(build, cuda=cuda)
    assert (found.at_start, found.peak, found.at_end) == (1000, 1701, 1000)
    assert found.allocated_peak == 1024 + 1024 + 512
    assert found.device == "cuda"
    assert cuda.synchronized >= 3


def test_cuda_sees_what_a_step_leaves() -> None:
    cuda = FakeCuda()

    def build() -> Callable[[], object]:
        return lambda: cuda.allocate(100)

    found = measure_cuda(build, cuda=cuda)
    assert (found.at_start, found.peak, found.at_end) == (200, 300, 300)


def test_cuda_without_a_device_is_inconclusive() -> None:
    with pytest.raises(InconclusiveError, match="no CUDA device"):
        measure_cuda(known, cuda=FakeCuda(available=False))
