"""Two programs compared at their peaks: bytes, formula, and the storages that make the difference.

Both are looked at in one place, that of the larger peak: peak(head) - peak(base) is what differs there, plus what the other
program's peak lies above that place. So storages that live at another moment only because the peak moved are not called a
change, and everything adds up to the byte:

    peak(head) - peak(base) = sum of changes + `elsewhere`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memir.analysis.inventory import collapse
from memir.analysis.liveness import LiveRange
from memir.diff.align import Alignment, align
from memir.diff.blame import Blame, blame
from memir.diff.change import APPEARED, GREW, LONGER, SHORTER, SHRANK, VANISHED, WORKSPACE, Change
from memir.diff.lines import Sources
from memir.diff.orders import Order, gained
from memir.diff.side import START, Moment, Side
from memir.errors import MemirError
from memir.ir.size import ZERO, Size

NO_SOURCES = Sources({}, {}, {}, ())


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a peak is."""

    phase: str
    op: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Difference:
    """What `memir diff` says. Bytes are requested bytes."""

    base: str
    head: str
    point: tuple[tuple[str, int], ...]
    before: int
    after: int
    delta: Size  # the head's formula at this point minus the base's
    formula_before: str
    formula_after: str
    spot_before: Spot
    spot_after: Spot
    moved: bool  # the peaks are not at the same operator
    orders: tuple[Order, ...]  # terms that the formula gained or lost
    changes: tuple[Change, ...]
    elsewhere: int  # what the other peak lies above the compared place; 0 where the peak stayed
    blames: tuple[Blame, ...]  # changed stretches of code, the likeliest first
    inconclusive: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes higher the head's peak is."""
        return self.after - self.before


def compare(base: Side, head: Side, sources: Sources = NO_SOURCES) -> Difference:
    """The difference of two programs. Errors are those of `timeline` and `check`."""
    alignment = align(
        base.line.steps, head.line.steps, base.flat.storages, head.flat.storages, sources.to_head if sources.pairs else _same
    )
    ours, theirs = base.peak_moment, head.peak_moment
    before, after = base.live_bytes(ours).evaluate(base.point), head.live_bytes(theirs).evaluate(head.point)
    is_larger = after >= before
    places = (_counterpart(theirs, alignment.ops_back), theirs) if is_larger else (ours, _counterpart(ours, alignment.ops))
    found = list(_changes(base, head, places, alignment))
    here = [side.live_bytes(place).evaluate(side.point) for side, place in zip((base, head), places, strict=True)]
    elsewhere = here[0] - before if is_larger else after - here[1]
    if sum(change.nbytes for change in found) + elsewhere != after - before:
        raise MemirError(f"the changes do not add up to {after - before} bytes", where=f"{base.label} and {head.label}")
    changes = tuple(sorted(_grouped(found), key=lambda c: (-abs(c.nbytes), c.what, c.kind, c.module, c.op, c.source)))
    touched = [
        step.op.source
        for step_of, known in ((base.line.steps, alignment.ops), (head.line.steps, alignment.ops_back))
        for i, step in enumerate(step_of)
        if i not in known
    ]
    pieces = [side.formula.evaluate(side.point)[1].size for side in (base, head)]
    return Difference(
        base=base.label,
        head=head.label,
        point=tuple(head.point.items()),
        before=before,
        after=after,
        delta=pieces[1] - pieces[0],
        formula_before=_formula(base),
        formula_after=_formula(head),
        spot_before=_spot(base, ours),
        spot_after=_spot(head, theirs),
        moved=_counterpart(theirs, alignment.ops_back) != ours,
        orders=gained(base.formula.total, head.formula.total, head.point),
        changes=changes,
        elsewhere=elsewhere,
        blames=blame(changes, after - before, sources, touched),
        inconclusive=(*base.inconclusive, *(reason for reason in head.inconclusive if reason not in base.inconclusive)),
    )


def _same(source: str) -> str:
    return source


def _formula(side: Side) -> str:
    from memir.analysis.regions import maximum

    return maximum(side.formula.total)


def _spot(side: Side, moment: Moment) -> Spot:
    op = side.op(moment)
    return Spot(side.phase(moment), op.opcode if op else "", op.path if op else "", op.source if op else "")


def _counterpart(moment: Moment, known: Mapping[int, int]) -> Moment:
    """The same place in the other program; after the operator before it where this one is only here."""
    if moment.op == START:
        return moment
    other = known.get(moment.op)
    if other is not None:
        return Moment(other, moment.after)
    position = moment.op - 1
    while position >= 0 and known.get(position) is None:
        position -= 1
    return Moment(known[position] if position >= 0 else START, after=True)


def _changes(base: Side, head: Side, places: tuple[Moment, Moment], alignment: Alignment) -> Iterator[Change]:
    """A change for every storage that differs at the two places."""
    ours, theirs = base.alive(places[0]), head.alive(places[1])
    changed = _changed_sizes(base, head, alignment)
    for name, live in theirs.items():
        partner = alignment.storages_back.get(name)
        if partner is None:
            yield _change(APPEARED, None, live, base, head, changed, alignment)
        elif partner not in ours:
            yield _change(LONGER, None, live, base, head, changed, alignment)
        elif live.storage.nbytes != ours[partner].storage.nbytes:
            yield _change(GREW, ours[partner], live, base, head, changed, alignment)
    for name, live in ours.items():
        partner = alignment.storages.get(name)
        if partner is None:
            yield _change(VANISHED, live, None, base, head, changed, alignment)
        elif partner not in theirs:
            yield _change(SHORTER, live, None, base, head, changed, alignment)
    scratches = base.scratch(places[0]), head.scratch(places[1])
    if scratches[0] != scratches[1]:
        op = head.op(places[1]) or base.op(places[0])
        assert op is not None
        numbers = scratches[0].evaluate(base.point), scratches[1].evaluate(head.point)
        what = GREW if numbers[1] >= numbers[0] else SHRANK
        delta = scratches[1] - scratches[0]
        yield Change(what, WORKSPACE, op.opcode, collapse(op.path), op.source, 1, *numbers, delta)


def _changed_sizes(base: Side, head: Side, alignment: Alignment) -> tuple[set[str], set[str]]:
    """Names of the base's and of the head's storages whose size is not the same in the other program."""
    ours = {s.name: s for s in base.flat.storages}
    theirs = {s.name: s for s in head.flat.storages}
    pairs = [(a, b) for a, b in alignment.storages.items() if ours[a].nbytes != theirs[b].nbytes]
    lonely = {a for a in ours if a not in alignment.storages}, {b for b in theirs if b not in alignment.storages_back}
    return lonely[0] | {a for a, _ in pairs}, lonely[1] | {b for _, b in pairs}


def _change(
    what: str,
    old: LiveRange | None,
    new: LiveRange | None,
    base: Side,
    head: Side,
    changed: tuple[set[str], set[str]],
    alignment: Alignment,
) -> Change:
    before, after = (old.storage.nbytes if old else ZERO), (new.storage.nbytes if new else ZERO)
    numbers = before.evaluate(base.point), after.evaluate(head.point)
    if what == GREW and numbers[1] < numbers[0]:
        what = SHRANK
    side, live = (head, new) if new is not None else (base, old)
    assert live is not None
    kind, steps = str(live.storage.kind), side.line.steps
    keeper = steps[live.saved].op.source if live.saved is not None else ""
    delta = after - before
    if live.made is None:
        of = live.storage.of or live.storage.name
        return Change(what, kind, "", collapse(of), "", 1, *numbers, delta, keeper, live.storage.of is None)
    op = steps[live.made].op
    here = changed[1] if new is not None else changed[0]
    holds = _storage_of(side)
    is_new = live.made not in (alignment.ops_back if new is not None else alignment.ops)
    root = is_new or not any(holds.get(operand) in here for operand in op.operands)
    return Change(what, kind, op.opcode, collapse(op.path), op.source, 1, *numbers, delta, keeper, root)


def _storage_of(side: Side) -> dict[str, str]:
    found = side.__dict__.get("_storage_of")
    if found is None:
        found = {value.name: value.storage for value in side.flat.values}
        found |= {value.name: value.storage for step in side.line.steps for value in step.op.results}
        side.__dict__["_storage_of"] = found
    return found


def _grouped(changes: Sequence[Change]) -> Iterator[Change]:
    groups: dict[tuple[object, ...], list[Change]] = {}
    for change in changes:
        key = change.what, change.kind, change.op, change.module, change.source, change.keeper, change.is_root
        groups.setdefault(key, []).append(change)
    for members in groups.values():
        yield replace(
            members[0],
            count=len(members),
            before=sum(c.before for c in members),
            after=sum(c.after for c in members),
            delta=sum((c.delta for c in members), ZERO),
        )
