"""The search: every candidate's peak and time, the best of each kind, the winner.

A candidate is pruned by a bound (memir.planner.bounds), before any pass of its methods runs, where it cannot fit, or cannot be
faster than what was found of its kind. All others are evaluated: the peak from the formula of their program, the time from its
operators and what the methods communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from memir.analysis.cost.device import Device
from memir.analysis.cost.operators import Spent
from memir.analysis.cost.parts import Parts
from memir.analysis.cost.step import Exchange, StepTime, bubble_of, step_time
from memir.errors import InconclusiveError, UsageError
from memir.hardware.links import HOST_MEMORY, Cluster
from memir.planner.bounds import Bounds
from memir.planner.facts import Facts
from memir.planner.methods import Method, Run
from memir.planner.space import CHECKPOINTS, Candidate, Layout, batches, layouts
from memir.planner.variant import SOME, Variants

OBJECTIVES = ("time", "cost", "gpus")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked. `capacity`: bytes that a rank's tensors may take, the margin taken off already."""

    facts: Facts
    device: Device
    cluster: Cluster
    seq: int
    global_batch: int
    capacity: int
    checkpoints: tuple[str, ...]
    objective: str = "time"
    experts: bool = False


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate with its numbers. `peak`: requested bytes of a rank, or, with `bound`, what it takes at least."""

    candidate: Candidate
    num_gpus: int
    peak: int
    place: str
    fits: bool
    time: StepTime | None
    tokens: float  # a second, of all GPUs
    bound: bool = False
    host: int = 0  # requested bytes of a rank in the host's memory, where the method offloads


@dataclass(frozen=True, slots=True)
class Failure:
    """A variant that could not be made, and why."""

    kind: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that was looked at."""

    evaluated: tuple[Evaluated, ...]
    pruned: tuple[Evaluated, ...]
    failures: tuple[Failure, ...]  # one for each program
    failed: int  # candidates
    variants: int

    def best(self, objective: str) -> Evaluated | None:
        """The best that fits; None if nothing does."""
        fitting = [one for one in self.evaluated if one.fits]
        return min(fitting, key=lambda one: merit(one, objective), default=None)

    def rows(self, objective: str) -> list[Evaluated]:
        """The best of each kind: of those that fit, or else the one that takes least; the best kinds first.

        A kind of which nothing fits and some program could not be made is not among them: it is not known.
        """
        unknown = {failure.kind for failure in self.failures}
        kinds: dict[str, list[Evaluated]] = {}
        for one in (*self.evaluated, *(hope for hope in self.pruned if not hope.fits)):
            kinds.setdefault(one.candidate.layout.kind, []).append(one)
        best = [min(group, key=lambda one: (not one.fits, one.bound, *_order(one, objective))) for group in kinds.values()]
        known = [one for one in best if one.fits or one.candidate.layout.kind not in unknown]
        return sorted(known, key=lambda one: (not one.fits, *_order(one, objective)))


def merit(one: Evaluated, objective: str) -> tuple[float, float, str]:
    """What is to be small; equal ones are told apart by their text."""
    speed = 1 / one.tokens if one.tokens else float("inf")
    first = {"time": speed, "cost": one.num_gpus * speed, "gpus": float(one.num_gpus)}[objective]
    return first, speed, f"{one.candidate.text} {one.candidate.batch:06d}"


def _order(one: Evaluated, objective: str) -> tuple[float, float, str]:
    return merit(one, objective) if one.fits else (float(one.peak), 0.0, one.candidate.text)


class Search:
    """One run over the candidates. `step` is told the share that is done, from 0 to 1."""

    def __init__(
        self,
        problem: Problem,
        variants: Variants,
        copies: Sequence[Method],
        inner: Sequence[Method],
        step: Callable[[float], None] = lambda _: None,
        *,
        offloads: bool = True,
    ) -> None:
        """`offloads`: methods that keep states on the host are looked at in any case, not only where nothing else fits."""
        self.problem, self.variants = problem, variants
        self.copies, self.inner, self.step, self.offloads = copies, inner, step, offloads
        self.bounds = Bounds(problem.facts, problem.device, problem.seq, variants)
        self._parts: dict[tuple[str, int, int, int], Parts] = {}
        self._failures: dict[str, Failure] = {}
        self._dead: dict[tuple[Layout, int], str] = {}  # layouts of which no program can be made, at all or accumulating

    def run(self) -> Found:
        """Evaluates all of them. UsageError where no division of the GPUs suits the global batch."""
        for checkpoint in self.problem.checkpoints:
            variant = self.variants.get(CHECKPOINTS[checkpoint], SOME, 1)
            if variant.failure:
                self._failures[variant.text] = Failure("checkpointing", variant.text, variant.failure)
        found = [pair for pair in self.candidates() if CHECKPOINTS[pair[0].checkpoint] not in self._failures]
        if not found:
            raise UsageError(
                f"--global-batch {self.problem.global_batch}: {self.problem.cluster.num_gpus} GPUs cannot be divided so that "
                "every copy of the model has as many sequences",
                hint="take a multiple of the number of GPUs",
            )
        kinds: dict[str, list[tuple[Candidate, int]]] = {}
        for candidate, gpus in found:
            kinds.setdefault(candidate.layout.kind, []).append((candidate, gpus))
        evaluated: list[Evaluated] = []
        pruned: list[Evaluated] = []
        done = failed = 0
        ordered = sorted(kinds.items(), key=lambda item: item[1][0][0].layout.offloads)
        for kind, group in ordered:
            if group[0][0].layout.offloads and not self.offloads and any(one.fits for one in evaluated):
                found = [pair for pair in found if pair[0].layout.kind != kind]
                continue
            for one in self._kind(group):
                done += 1
                self.step(done / len(found))
                if one is not None:
                    (pruned if one.bound else evaluated).append(one)
                else:
                    failed += 1
        failures = tuple(sorted(self._failures.values(), key=lambda f: (f.kind, f.text)))
        return Found(tuple(evaluated), tuple(pruned), failures, failed, self.variants.count)

    def _kind(self, group: Sequence[tuple[Candidate, int]]) -> Iterator[Evaluated | None]:
        """The candidates of a kind, those that may be the best first; of the rest, what cannot be better is pruned."""
        problem = self.problem

        def hoped(candidate: Candidate, gpus: int) -> Evaluated:
            tokens = problem.global_batch * problem.seq / self.bounds.seconds(candidate)
            nbytes = self.bounds.nbytes(candidate)
            return Evaluated(candidate, gpus, nbytes, "", False, None, tokens, bound=True)

        best: Evaluated | None = None
        hopes = [hoped(*pair) for pair in group]
        for hope in sorted(hopes, key=lambda one: merit(one, problem.objective)):
            if hope.peak > problem.capacity:
                yield hope
            elif best is not None and merit(hope, problem.objective)[:2] >= merit(best, problem.objective)[:2]:
                yield replace(hope, fits=True)  # as far as the bound says; it is slower than what was found
            else:
                one = self.evaluate(hope.candidate, hope.num_gpus)
                if (
                    one is not None
                    and one.fits
                    and (best is None or merit(one, problem.objective) < merit(best, problem.objective))
                ):
                    best = one
                yield one

    def candidates(self) -> Iterator[tuple[Candidate, int]]:
        """All of them with the GPUs that each uses, those of one program together."""
        problem = self.problem
        total = problem.cluster.num_gpus
        counts = [total] if problem.objective == "time" else [n for n in range(1, total + 1) if total % n == 0]
        for gpus in counts:
            for layout in layouts(gpus, min(gpus, problem.cluster.per_node), self.copies, self.inner, problem.experts):
                for checkpoint in problem.checkpoints:
                    for batch, accumulate in batches(layout, problem.global_batch):
                        yield Candidate(layout, checkpoint, batch, accumulate), gpus

    def evaluate(self, candidate: Candidate, gpus: int) -> Evaluated | None:
        """Its peak and time; None where its program cannot be made, or does not hold there."""
        problem = self.problem
        seq = problem.seq
        accumulate = candidate.step[1]
        dead = self._dead.get((candidate.layout, 0)) or self._dead.get((candidate.layout, min(accumulate, SOME)))
        if dead:
            return None
        variant = self.variants.get(candidate.text, candidate.batch, accumulate)
        if variant.failure:
            self._dead[candidate.layout, 0 if variant.refused else min(accumulate, SOME)] = variant.failure
            self._fail(candidate, variant.failure)
            return None
        try:
            peak, place = variant.peak(candidate.batch, seq)
        except (UsageError, InconclusiveError) as error:
            self._fail(candidate, error.message)
            return None
        fits = peak <= problem.capacity
        time = self.time(candidate, gpus)
        tokens = problem.global_batch * seq / time.seconds
        host = variant.host(problem.seq) if candidate.layout.offloads else 0
        return Evaluated(candidate, gpus, peak, place, fits, time, tokens, host=host)

    def time(self, candidate: Candidate, gpus: int) -> StepTime:
        """The predicted step."""
        problem, layout = self.problem, candidate.layout
        computing = self._computing(candidate)
        degrees = layout.degrees
        run = Run(
            problem.facts, degrees, candidate.batch, problem.seq, candidate.checkpoint != "none",
            replace(problem.cluster, num_gpus=gpus), problem.device.host,
        )  # fmt: skip
        stepping = 0.0
        if layout.offloads:  # the optimizer moves its bytes in the host's memory, which the ranks of a node share
            moved = computing.optimizer.memory * problem.device.bandwidth
            stepping = moved * min(gpus, problem.cluster.per_node) / HOST_MEMORY
            computing = replace(computing, optimizer=Spent())
        methods = (*layout.inner, *([layout.copies] if layout.copies else []))
        exchange = reduce(lambda a, b: a + b, (method.communicates(run) for method in methods), Exchange())
        every = layout.copies is None or layout.copies.every
        bubble = bubble_of(degrees.pipeline) if degrees.pipeline > 1 else 0.0
        return step_time(computing, exchange, accumulate=candidate.accumulate, every=every, bubble=bubble, host=stepping)

    def _computing(self, candidate: Candidate) -> Parts:
        """Of one micro-batch. A pipeline's is that of its largest stage: its part of the layers, and the head and the loss."""
        problem, layers = self.problem, self.problem.facts.layers
        stages = candidate.layout.degrees.pipeline
        inner = replace(candidate.layout, inner=tuple(m for m in candidate.layout.inner if m.axis != "pipeline"))
        plain = replace(candidate, layout=inner)
        key = (plain.text, candidate.batch, stages, min(candidate.accumulate, SOME))
        if key not in self._parts:
            several = 1 if stages > 1 else min(candidate.accumulate, SOME)
            variant = self.variants.get(plain.text, candidate.batch, several)
            found = variant.parts(candidate.batch, problem.seq, problem.device, max(1, layers // stages), several)
            if stages > 1:
                found = replace(
                    found,
                    layer_forward=found.layer_forward * (1 / stages),
                    layer_backward=found.layer_backward * (1 / stages),
                    optimizer=found.optimizer * (1 / stages),
                )
            self._parts[key] = found
        return self._parts[key]

    def _fail(self, candidate: Candidate, reason: str) -> None:
        layout = candidate.layout
        self._failures.setdefault(candidate.text, Failure(layout.kind, candidate.text, reason))
