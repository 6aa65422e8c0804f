"""The script that measures steps on a GPU: its logic, with a device that is not one, and the page that compares."""

from __future__ import annotations

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.compare import page
from benchmarks.gpu.meter import Meter
from memir.frontend import presets
from memir.recipe import Recipe
from memir.runtime.real import RealStep, builder


class Counter:
    """Counts as torch.cuda does: what the test says is allocated."""

    def __init__(self) -> None:
        self.now = self.most = self.reserved = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)
        self.reserved = max(self.reserved, self.now)

    def synchronize(self) -> None:
        return

    def memory_allocated(self) -> int:
        return self.now

    def max_memory_allocated(self) -> int:
        return self.most

    def max_memory_reserved(self) -> int:
        return self.reserved

    def memory_reserved(self) -> int:
        return self.reserved

    def reset_peak_memory_stats(self) -> None:
        self.most = self.now

    def mem_get_info(self) -> tuple[int, int]:
        return 1000 - self.reserved - 50, 1000


def test_peaks_are_told_by_phase_and_of_the_last_step() -> None:
    device = Counter()
    meter = Meter(device)
    steps = 0

    def step() -> None:
        nonlocal steps
        for phase, most in (("micro0.forward", 10), ("micro1.forward", 30), ("micro1.backward", 40), ("optimizer", 20)):
            meter.on_phase(phase)
            device.take(most + steps)
            device.take(-most - steps)
        device.take(5 if steps == 0 else 0)  # the optimizer's state
        steps += 1

    found = meter.measure(step, steps=3)
    assert found.phases == {"forward": 37, "backward": 47, "optimizer": 27}
    assert (found.steady, found.peak, found.reserved, found.device) == (5, 47, 47, 97)


def test_the_loop_tells_its_phases_in_a_real_step(tmp_path: object) -> None:
    told: list[str] = []
    sizes = {"n_layer": "1", "n_embd": "32", "n_head": "2", "vocab_size": "64"}
    recipe = Recipe(target="cpu", dtype="f32", accumulate=2)
    builder(RealStep("gpt2", recipe, 2, 16, sizes), on_phase=told.append)()()
    assert told == ["micro0.forward", "micro0.backward", "micro1.forward", "micro1.backward", "optimizer"]


def test_every_case_is_a_preset_between_0_1_and_1_5_billion_parameters() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 12
    for case in CASES:
        known = presets.get(case.preset)
        assert known is not None
        assert 0.1e9 < known.params < 1.6e9


def test_the_page_has_errors_and_cases_that_did_not_run() -> None:
    case = CASES[0]
    phases = {"forward": 5_000_000_000, "backward": 10_000_000_000, "optimizer": 1_000_000_000}
    row = {"case": case.name, "compute": "8.0", "steady": 10**9, "peak": 10**10, "reserved": 10**10, "phases": phases}
    text = page([row, {"case": CASES[1].name, "error": "out of memory"}])
    assert f"| {case.name} | steady | 1,000,000,000 |" in text
    assert f"| {CASES[1].name} | did not run: out of memory |" in text
    assert text.count(f"| {case.name} |") == 6
