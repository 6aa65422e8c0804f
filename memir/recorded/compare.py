"""A predicted step beside a recorded one: figures phase by phase, the requests in order, the first that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memir.errors import InconclusiveError
from memir.recorded.history import Figures, History, history
from memir.recorded.recording import Event, Recording, frame_texts
from memir.recorded.steps import Step, by_annotations, by_sizes, requests, whole


@dataclass(frozen=True, slots=True)
class Row:
    """One line of figures: the predicted ones and the recorded ones (None where the recording does not tell), with the numbers
    of allocations."""

    name: str  # "between steps", a phase, or "step"
    predicted: Figures
    recorded: Figures | None
    num_predicted: int
    num_recorded: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """An allocation: bytes, and who made it as "file:line name" of the user's own code where that is known."""

    nbytes: int
    place: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first allocation of the step, counted from 1, whose size differs; None where one of the two made no more."""

    number: int
    predicted: Request | None
    recorded: Request | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. `steady`, `phases` and `step` are at the step's start, in its phases, and in all of it."""

    steady: Row
    phases: tuple[Row, ...]
    step: Row
    first: Difference | None
    only_predicted: tuple[tuple[int, int], ...]  # sizes that one of the two asks for more often, largest first, and how much
    only_recorded: tuple[tuple[int, int], ...]
    by: str  # how the recorded step was found
    num_events: int  # of the recording

    def agrees(self, tolerance: int) -> bool:
        """Whether the bytes between steps and at the peak are as predicted, give or take `tolerance`."""
        return all(
            row.recorded is not None and abs(row.predicted.requested - row.recorded.requested) <= tolerance
            for row in (self.steady, self.step)
        )


def compare(predicted: Recording, recorded: Recording, where: str) -> Comparison:
    """Compare a predicted snapshot of one step with a recorded one.

    UsageError where the recording contradicts itself; InconclusiveError where no step in it looks like the predicted one.
    """
    ours, theirs = history(predicted, "the predicted snapshot"), history(recorded, where)
    our_step = whole(predicted)
    asked = requests(predicted, our_step.start, our_step.end)
    sizes = [event.size for event in asked]
    step = by_annotations(recorded, [name for name, _ in our_step.phases]) or by_sizes(recorded, sizes)
    if step is None:
        raise InconclusiveError(
            f"{where}: no step in it asks for what the predicted one does",
            hint="are batch, sequence length, dtype and model the recorded ones? did the recording see a whole step?",
        )
    made = requests(recorded, step.start, step.end)
    first = _first_difference(asked, made)
    step = _with_phases(step, our_step, predicted, recorded)
    more, fewer = _surplus(sizes, [event.size for event in made])
    return Comparison(
        steady=Row("between steps", ours.at(our_step.start), theirs.at(step.start), 0, 0),
        phases=_phases(ours, our_step, theirs, step),
        step=_row("step", (ours, our_step.start, our_step.end), (theirs, step.start, step.end)),
        first=first,
        only_predicted=more,
        only_recorded=fewer,
        by=step.by,
        num_events=len(recorded.events),
    )


def _first_difference(asked: Sequence[Event], made: Sequence[Event]) -> Difference | None:
    for number in range(max(len(asked), len(made))):
        one = asked[number] if number < len(asked) else None
        other = made[number] if number < len(made) else None
        if one is None or other is None or one.size != other.size:
            return Difference(number + 1, _request(one), _request(other))
    return None


def _request(event: Event | None) -> Request | None:
    return None if event is None else Request(event.size, user_frame(event))


def user_frame(event: Event) -> str:
    """The innermost frame that is neither PyTorch's nor C++'s; the innermost one where all are, "" without frames."""
    texts = frame_texts(event)
    for text in texts:
        file = text.partition(" ")[0].rpartition(":")[0]
        if file.endswith(".py") and "/torch/" not in file and not file.startswith("torch/"):
            return text
    return texts[0] if texts else ""


def _with_phases(step: Step, ours: Step, predicted: Recording, recorded: Recording) -> Step:
    """The step with the phases that follow from what is alike.

    As far as requests and frees are the same from its start on, a phase begins where the predicted one does; where only the
    requests are, it begins with its first one.
    """
    if step.phases:
        return step
    phases = []
    for name, start in ours.phases:
        place = None
        for actions in (("alloc", "free_completed"), ("alloc",)):
            wanted = [(e.action, e.size) for e in predicted.events[ours.start : ours.end] if e.action in actions]
            number = sum(e.action in actions for e in predicted.events[ours.start : start])
            places = [n for n in range(step.start, step.end) if recorded.events[n].action in actions]
            made = [(recorded.events[n].action, recorded.events[n].size) for n in places]
            if place is None and number < len(places) and made[:number] == wanted[:number]:
                place = places[number] if number else step.start
        if place is None:
            break
        phases.append((name, place))
    return Step(step.start, step.end, tuple(phases), step.by)


def _phases(ours: History, our_step: Step, theirs: History, step: Step) -> tuple[Row, ...]:
    known = dict(step.phases)
    rows = []
    for number, (name, start) in enumerate(our_step.phases):
        end = our_step.phases[number + 1][1] if number + 1 < len(our_step.phases) else our_step.end
        following = our_step.phases[number + 1][0] if number + 1 < len(our_step.phases) else None
        stretch = None
        if name in known and (following is None or following in known):
            stretch = (theirs, known[name], step.end if following is None else known[following])
        rows.append(_row(name, (ours, start, end), stretch))
    return tuple(rows)


Stretch = tuple[History, int, int]


def _row(name: str, ours: Stretch, theirs: Stretch | None) -> Row:
    def number(stretch: Stretch) -> int:
        return len(requests(stretch[0].recording, *stretch[1:]))

    return Row(
        name,
        ours[0].peak(*ours[1:]),
        None if theirs is None else theirs[0].peak(*theirs[1:]),
        number(ours),
        None if theirs is None else number(theirs),
    )


def _surplus(asked: Sequence[int], made: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    one, other = Counter(asked), Counter(made)
    more, fewer = one - other, other - one
    return tuple(sorted(more.items(), reverse=True)), tuple(sorted(fewer.items(), reverse=True))
