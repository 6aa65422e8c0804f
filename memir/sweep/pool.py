"""Which traced program holds at which B and S: as few traces as that takes, and a reason for every point without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Program
from memir.ir.domain import Condition
from memir.sweep.grid import Grid, Point

DEFAULT_SEQ = 2048  # memir.api's
MAX_TRACES = 8  # of one recipe; a model whose every size needs a trace of its own would take hours


@dataclass(frozen=True, slots=True)
class Step:
    """A traced step: `program` holds where it was traced at least, `general` at the neighbours if `program` does not."""

    program: Program
    general: Program | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)  # symbols besides B and S that the target fixes, such as L
    seq: int = 1  # S of the trace
    name: str = ""  # the model's
    max_seq: int | None = None  # the longest sequence that it accepts
    versions: tuple[tuple[str, str], ...] = ()  # of memir, torch, transformers, ...
    assumptions: tuple[str, ...] = ()
    inconclusive: tuple[str, ...] = ()  # why `program` is not proven


# Traces at B and S (None: the default length). UsageError: the target or that point cannot be meant; InconclusiveError: no
# proof there.
Trace = Callable[[int, int | None], Step]


class _Condition:
    """One condition of a domain, decided once for each value that it depends on. One that cannot be read holds nowhere."""

    def __init__(self, text: str, fixed: Mapping[str, int]) -> None:
        self.text, self._fixed = text, fixed
        self._condition = Condition.read(text)
        self.is_readable = self._condition is not None
        symbols = sorted(self._condition.symbols() - fixed.keys()) if self._condition else []
        self._axis = {(): 0, ("B",): 0, ("S",): 1}.get(tuple(symbols))  # None: of both
        self._known: dict[int | Point, bool] = {}

    def holds(self, point: Point) -> bool:
        key = point if self._axis is None else point[self._axis]
        known = self._known.get(key)
        if known is None:
            env = {"B": point[0], "S": point[1], **self._fixed}
            known = self._known[key] = self._condition is not None and self._condition.holds(env) is True
        return known


class Holding:
    """A program, its grid, and the points where it holds."""

    def __init__(self, program: Program, step: Step, traced_at: Point | None, rounds: bool) -> None:
        self.program, self.step, self.traced_at = program, step, traced_at
        self.fixed = {name: value for name, value in step.fixed.items() if name in program.dims}
        self.grid = Grid(program, fixed=self.fixed, rounds=rounds)
        self._conditions = [_Condition(text, self.fixed) for text in program.domain]
        self.is_readable = all(condition.is_readable for condition in self._conditions)

    def holds(self, point: Point) -> bool:
        """Whether the program is proven there. With a condition that cannot be read that is only where it was traced."""
        return all(c.holds(point) for c in self._conditions) if self.is_readable else point == self.traced_at

    def broken(self, point: Point) -> str:
        """The first condition of the domain that does not hold there; "" if all do."""
        return next((condition.text for condition in self._conditions if not condition.holds(point)), "")

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why its numbers are not proven; empty if they are. It concerns the traced program, not its general companion."""
        return tuple(self.step.inconclusive) if self.program is self.step.program else ()


class Pool:
    """The programs of one recipe. `trace` makes more of them, at most `max_traces` times."""

    def __init__(self, trace: Trace, *, rounds: bool, max_traces: int = MAX_TRACES) -> None:
        self._trace, self._rounds, self._max_traces = trace, rounds, max_traces
        self.holdings: list[Holding] = []
        self.steps: list[Step] = []
        self._refused: dict[int, str] = {}  # S -> why it and everything longer is refused
        self._failed: dict[Point, str] = {}

    @property
    def max_seq(self) -> int | None:
        """The longest sequence that the model accepts, as far as it is known yet."""
        return next((step.max_seq for step in self.steps if step.max_seq is not None), None)

    @property
    def name(self) -> str:
        """The model's name, as far as it is known yet."""
        return next((step.name for step in self.steps if step.name), "the model")

    @property
    def limit(self) -> str:
        """The model's limit in words."""
        return f"{self.name} accepts sequences of at most {self.max_seq} tokens"

    def refuses(self, seq: int) -> str:
        """Why the model does not run at this length; "" where it may."""
        if self.max_seq is not None and seq > self.max_seq:
            return self.limit
        refused = min(self._refused, default=seq + 1)
        return self._refused[refused] if seq >= refused else ""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed in any of the traces, each once."""
        return tuple(dict.fromkeys(text for step in self.steps for text in step.assumptions))

    def default_seq(self, batch: int) -> int:
        """The length of the first trace; without one, of a trace for which no length is asked. Errors as the trace's."""
        if not self.steps:
            step = self._trace(batch, None)
            self._add(step, (batch, step.seq))
        return self.steps[0].seq

    def assign(self, points: Iterable[Point]) -> tuple[dict[Point, Holding], dict[Point, str]]:
        """The program of each point, and for the points without one the reason.

        UsageError where nothing at all can be traced for these points, so that the target or an option must be wrong;
        InconclusiveError where the first trace has no proof.
        """
        points = list(points)
        while True:
            found, reasons, pending = self._settle(points)
            if not pending:
                return found, reasons
            if len(self.steps) + len(self._failed) >= self._max_traces:
                reasons.update((point, f"{self._near_miss(point)}, and no more is traced") for point in pending)
                return found, reasons
            self._extend(pending)

    def _settle(self, points: Sequence[Point]) -> tuple[dict[Point, Holding], dict[Point, str], list[Point]]:
        """The points with a program, those with a reason, and those that are open."""
        found: dict[Point, Holding] = {}
        reasons: dict[Point, str] = {}
        pending: list[Point] = []
        refusals = {seq: self.refuses(seq) for seq in {seq for _, seq in points}}
        for point in points:
            if refusals[point[1]]:
                reasons[point] = refusals[point[1]]
            elif point in self._failed:
                reasons[point] = self._failed[point]
            else:
                holding = next((h for h in self.holdings if h.holds(point)), None)
                if holding is None:
                    pending.append(point)
                else:
                    found[point] = holding
        return found, reasons, pending

    def _extend(self, pending: Sequence[Point]) -> None:
        """One more trace: at the smallest batch, for B=1 is traced beside the others, and in the middle of its lengths."""
        batch = min(point[0] for point in pending)
        seqs = sorted(point[1] for point in pending if point[0] == batch)
        at = (batch, seqs[len(seqs) // 2])
        try:
            self._add(self._trace(*at), at)
        except UsageError as error:
            if not self.steps and at[1] == min(point[1] for point in pending):
                raise
            self._refused[at[1]] = f"S={at[1]} is refused: {_one_line(error)}"
        except InconclusiveError as error:
            if not self.steps:
                raise
            self._failed[at] = _one_line(error)

    def _add(self, step: Step, at: Point) -> None:
        self.steps.append(step)
        self.holdings.append(Holding(step.program, step, at, self._rounds))
        if step.general is not None:
            self.holdings.append(Holding(step.general, step, None, self._rounds))
        self.holdings.sort(key=lambda holding: bool(holding.doubts))  # what is proven goes first
        if not any(holding.holds(at) for holding in self.holdings):
            self._failed[at] = self._near_miss(at)

    def _near_miss(self, point: Point) -> str:
        """The condition that keeps the latest program from a point."""
        broken = [holding.broken(point) for holding in self.holdings]
        text = next((text for text in reversed(broken) if text), "the traced point")
        return f"the program holds for {text} only"


def _one_line(error: MemirError) -> str:
    return "; ".join(filter(None, [error.message, *error.where.splitlines()[:1]]))
