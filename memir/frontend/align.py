"""When Python lets go of what autograd keeps: the forward with gradients laid beside the forward without.

Autograd hides the end of a saved tensor's last Python reference. The same forward under no_grad has the same operators, and
there a storage dies exactly then. Aligned operator by operator, that moment is a `drop` in the program.
"""

from __future__ import annotations

from collections import defaultdict
from difflib import SequenceMatcher

from memir.frontend.record import Recorder

_ALIASES = ("aten.detach", "aten.alias", "aten.as_strided")


def forward_events(recorder: Recorder, phase: str) -> list[int]:
    """The numbers of the operators of a forward phase, without pseudo-operators and handles on the same view."""
    return [
        number
        for number, event in enumerate(recorder.events)
        if event.phase == phase and not event.opcode.startswith("memir.") and event.opcode not in _ALIASES
    ]


def _match(recorder: Recorder, ours: list[int], released: Recorder, theirs: list[int]) -> dict[int, int]:
    """Their operator -> ours, where both run the same one on a first result of the same size.

    Further results may differ: attention kernels leave the logarithms of the sums out where nothing requires a gradient.
    """

    def look(rec: Recorder, number: int) -> tuple[str, int, object]:
        event = rec.events[number]
        return event.opcode, len(event.results), rec.values[event.results[0]].shape if event.results else None

    left = [look(recorder, n) for n in ours]
    right = [look(released, n) for n in theirs]
    if left == right:
        return dict(zip(theirs, ours, strict=True))
    matched: dict[int, int] = {}
    for a, b, length in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
        matched.update({theirs[b + i]: ours[a + i] for i in range(length)})
    return matched


def drops_of(recorder: Recorder, released: Recorder) -> dict[int, list[int]]:
    """Event number -> storages whose last Python reference goes after it while autograd still holds them."""
    theirs = forward_events(released, "forward")
    theirs_all = [n for n, e in enumerate(released.events) if e.phase == "forward"]
    drops: dict[int, list[int]] = defaultdict(list)
    for phase in dict.fromkeys(e.phase for e in recorder.events if e.phase.endswith("forward")):
        matched = _match(recorder, forward_events(recorder, phase), released, theirs)
        pseudo = {e.source: n for n, e in enumerate(recorder.events) if e.opcode == "memir.free" and _near(recorder, n, phase)}
        nearest: dict[int, int] = {}  # their event -> the event of ours at or before it
        current: int | None = None
        for number in theirs_all:
            event = released.events[number]
            if event.opcode == "memir.free" and event.source in pseudo:
                current = pseudo[event.source]
            current = matched.get(number, current)
            if current is not None:
                nearest[number] = current
        for their, our in matched.items():
            for theirs_value, ours_value in zip(released.events[their].results, recorder.events[our].results, strict=True):
                gone = released.storages[released.values[theirs_value].storage]
                index = recorder.values[ours_value].storage
                kept = recorder.storages[index]
                if gone.born != their or kept.born != our or gone.died is None or gone.died not in nearest:
                    continue
                at = nearest[gone.died]
                if kept.died is not None and kept.died > at and index not in drops[at]:
                    drops[at].append(index)
    return {number: storages for number, storages in drops.items() if storages}


def _near(recorder: Recorder, number: int, phase: str) -> bool:
    """Whether a pseudo-operator belongs to this micro-batch: in its forward phase, or in the backward that follows it."""
    prefix = phase.removesuffix("forward")
    return recorder.events[number].phase in (phase, f"{prefix}backward")
