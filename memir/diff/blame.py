"""Which changed stretch of code is behind a difference.

Every group of storages that moves the peak in the direction of the difference gives its bytes to the changed stretches,
weighted by how they are tied to it:

| tie | weight |
|---|---|
| the line that makes it, where the change begins with that operator (no operand changed) | 100 |
| the line because of which autograd keeps it | 60 |
| a line of the module's constructor, or of the names that it and the making line read | 30 |
| the line that makes it, where an operand changed already | 20 |
| a line that reads the variable that the making line gives a value | 15 |
| the same function, class, file | 8, 4, 2 |

A stretch that only renames or moves (`memir.diff.lines`) has a fiftieth of it. Weights only order the stretches; no byte
depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memir.diff.change import LONGER, SHORTER, Change
from memir.diff.lines import Hunk, Source, Sources, split

OWN, KEEPER, NAMED, PASSED, READER = 100.0, 60.0, 30.0, 20.0, 15.0
NEAR = (8.0, 4.0, 2.0)  # the same function, class, file
INSERTED = 0.1  # of everything: an operator that only one program has stands there
NEUTRAL = 0.02  # how much of a tie is left where a stretch only renames or moves


@dataclass(frozen=True, slots=True)
class Blame:
    """A changed stretch of code that a difference is laid to."""

    file: str  # the head's
    line: int  # in the head; of a removed line, the one that follows it there
    base_line: int  # where the line was removed: its number in the base; else 0
    text: str  # the line's code
    weight: float  # its share of the evidence, 0 to 1
    nbytes: int  # of the changes that are tied to this stretch more than to any other


@dataclass(frozen=True, slots=True)
class _Tie:
    weight: float
    line: int  # in the head, or in the base where `in_base`
    in_base: bool


def blame(changes: Sequence[Change], delta: int, sources: Sources, inserted: Iterable[str]) -> tuple[Blame, ...]:
    """The changed stretches with evidence, the likeliest first. `inserted`: lines of operators that only one program has."""
    if not sources.hunks:
        return ()
    wanted = [c for c in changes if c.nbytes * (delta or 1) > 0] or list(changes)
    total = sum(abs(c.nbytes) for c in wanted) or 1
    lines = {split(source) for source in inserted}
    scores: dict[Hunk, float] = {}
    best: dict[Hunk, tuple[float, _Tie]] = {}
    shares: dict[Hunk, int] = dict.fromkeys(sources.hunks, 0)
    for change in wanted:
        ties = {hunk: _neutral(_tie(change, hunk, sources), hunk) for hunk in sources.hunks}
        for hunk, tie in ties.items():
            gain = tie.weight * abs(change.nbytes) / total
            scores[hunk] = scores.get(hunk, 0) + gain
            if hunk not in best or gain > best[hunk][0]:
                best[hunk] = gain, tie
        first = max(ties, key=lambda hunk: ties[hunk].weight)
        if ties[first].weight > NEAR[0]:
            shares[first] += change.nbytes
    found = []
    for hunk in sources.hunks:
        stands = any(file in (hunk.file, hunk.base_file) and _has(hunk, file, line) for file, line in lines)
        score = scores.get(hunk, 0) + (INSERTED * OWN if stands and not hunk.neutral else 0)
        tie = best[hunk][1] if hunk in best else _Tie(0, 0, in_base=False)
        found.append((score, _blame(hunk, tie, score, shares[hunk], sources)))
    whole = sum(score for score, _ in found) or 1
    found.sort(key=lambda item: (-item[0], item[1].file, item[1].line))
    return tuple(
        Blame(b.file, b.line, b.base_line, b.text, score / whole, b.nbytes) for score, b in found if score > 0 or not wanted
    )


def _neutral(tie: _Tie, hunk: Hunk) -> _Tie:
    return _Tie(tie.weight * NEUTRAL, tie.line, tie.in_base) if hunk.neutral else tie


def _has(hunk: Hunk, file: str, line: int) -> bool:
    return (file == hunk.file and line in hunk.after) or (file == hunk.base_file and line in hunk.before)


def _blame(hunk: Hunk, tie: _Tie, score: float, nbytes: int, sources: Sources) -> Blame:
    """A stretch as it is shown: at the line of its strongest tie, or else its first line of code."""
    new, old = sources.head.get(hunk.file), sources.base.get(hunk.base_file)
    if not tie.in_base and tie.line in hunk.after:
        return Blame(hunk.file, tie.line, 0, sources.text(hunk, tie.line), score, nbytes)
    code = [line for line in hunk.after if new is None or line in new.is_code]
    if tie.in_base and tie.line in hunk.before and not code:
        return Blame(hunk.file, hunk.line, tie.line, sources.text(hunk, tie.line, removed=True), score, nbytes)
    if code:
        return Blame(hunk.file, code[0], 0, sources.text(hunk, code[0]), score, nbytes)
    gone = next((line for line in hunk.before if old is None or line in old.is_code), hunk.before.start)
    return Blame(hunk.file, hunk.line, gone, sources.text(hunk, gone, removed=True), score, nbytes)


def _tie(change: Change, hunk: Hunk, sources: Sources) -> _Tie:
    """How strongly a stretch is tied to a group of storages, and at which of its lines."""
    in_base = change.is_of_base
    file = hunk.base_file if in_base else hunk.file
    source = (sources.base if in_base else sources.head).get(file, Source((), frozenset()))
    lines = hunk.before if in_base else hunk.after
    made, kept = _statement(change.source, file, source), _statement(change.keeper, file, source)
    found = [_Tie(0, 0, in_base)]
    if common := _common(made, lines):
        found.append(_Tie(OWN if change.is_root else PASSED, common, in_base))
    if common := _common(kept, lines):
        found.append(_Tie(OWN if change.what in (LONGER, SHORTER) else KEEPER, common, in_base))
    for stretch, text, base_side in (
        (hunk.after, sources.head.get(hunk.file), False),
        (hunk.before, sources.base.get(hunk.base_file), True),
    ):
        if text is None:
            continue
        ours = source if base_side == in_base else None
        if line := _defines(change, made, source, stretch, text):
            found.append(_Tie(NAMED, line, base_side))
        if not change.op and (line := min((n for n in stretch if "*" in text.stores.get(n, ())), default=0)):
            found.append(_Tie(READER, line, base_side))
        if line := _reads(made, source, stretch, text):
            found.append(_Tie(READER, line, base_side))
        if ours is not None and made:
            found.append(_near(made.start, stretch, text, base_side))
    if made is None and (not change.source or split(change.source)[0] == file):
        found.append(_Tie(NEAR[2], 0, in_base))
    return max(found, key=lambda tie: tie.weight)


def _statement(place: str, file: str, source: Source) -> range | None:
    """The lines of the statement at `file:line`; None if it is in another file."""
    name, line = split(place)
    return source.statement(line) if name == file and line else None


def _common(statement: range | None, lines: range) -> int:
    """The first line that both have; 0 if none."""
    return next((line for line in statement or () if line in lines), 0)


def _defines(change: Change, made: range | None, source: Source, lines: range, text: Source) -> int:
    """The first of some lines that gives a value to the module's name, or to a name that its constructor or the making line
    reads; 0 if none does."""
    words = [word for word in change.module.replace("*", "").split(".") if word]
    names = set(words[-1:] if change.op else words[-2:])  # a parameter's name ends in `weight`, or in its own
    strong = {line for line in lines if names & text.stores.get(line, frozenset())}
    if strong:
        return min(strong)
    read: set[str] = set()
    for line, stored in text.stores.items():
        if names & stored:
            for at in text.statement(line):
                read |= text.loads.get(at, frozenset()) | text.stores.get(at, frozenset())
    for line in made or ():
        read |= source.loads.get(line, frozenset())
    read -= {"self", "nn", "torch", "F", "x"}
    return min((line for line in lines if read & text.stores.get(line, frozenset())), default=0)


def _reads(made: range | None, source: Source, lines: range, text: Source) -> int:
    """The first of some lines that reads a variable that the making statement gives a value; 0 if none does."""
    given = {name for line in made or () for name in source.stores.get(line, frozenset())}
    return min((line for line in lines if given & text.loads.get(line, frozenset())), default=0)


def _near(made: int, lines: range, text: Source, base_side: bool) -> _Tie:
    """Whether they lie in one function or class."""
    ours = text.around(made)
    for line in lines or range(lines.start, lines.start + 1):
        theirs = text.around(line)
        if ours[:1] and ours[:1] == theirs[:1]:
            return _Tie(NEAR[0], line, base_side)
        if set(ours) & set(theirs):
            return _Tie(NEAR[1], line, base_side)
    return _Tie(NEAR[2], 0, base_side)
