"""Which operator and which storage of one program is which of the other, where operators were inserted, removed or moved.

Operators of one phase and module path are laid beside each other as sequences (difflib), first by opcode and line of code,
where the base's line is taken to where it stands in the head, then, in the gaps that stay, by opcode alone. Paths that only
one program has are paired where they run the same operators. Storages follow their operators; those alive before the step go
by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.liveness import Step
from memir.ir.core import Storage

LARGE = 4_000_000  # cells; sequences with more are compared with difflib's heuristic for popular elements


@dataclass(frozen=True, slots=True)
class Alignment:
    """Positions of operators and names of storages: the base's to the head's, and back."""

    ops: Mapping[int, int]
    ops_back: Mapping[int, int]
    storages: Mapping[str, str]
    storages_back: Mapping[str, str]


def align(
    base: Sequence[Step],
    head: Sequence[Step],
    base_storages: Sequence[Storage],
    head_storages: Sequence[Storage],
    to_head: Callable[[str], str] = lambda source: source,
) -> Alignment:
    """The alignment of two flat programs; `to_head` gives where a base's line of code stands in the head ("": nowhere)."""
    ops = dict(_ops(base, head, to_head))
    storages = dict(_storages(base, head, base_storages, head_storages, ops))
    return Alignment(ops, {b: a for a, b in ops.items()}, storages, {b: a for a, b in storages.items()})


def _ops(base: Sequence[Step], head: Sequence[Step], to_head: Callable[[str], str]) -> Iterator[tuple[int, int]]:
    ours, theirs = _by_place(base), _by_place(head)
    lonely = [place for place in ours if place not in theirs]
    free: dict[Hashable, list[tuple[str, str]]] = {}
    for place in theirs:
        if place not in ours:
            free.setdefault(_shape(place, theirs[place], head), []).append(place)
    partner = {place: place for place in ours if place in theirs}
    for place in lonely:
        found = free.get(_shape(place, ours[place], base))
        if found:
            partner[place] = found.pop(0)
    for place, other in partner.items():
        a, b = ours[place], theirs[other]
        exact_a = [(base[i].op.opcode, to_head(base[i].op.source) or f"< {base[i].op.source}") for i in a]
        exact_b = [(head[i].op.opcode, head[i].op.source) for i in b]
        loose_a, loose_b = [opcode for opcode, _ in exact_a], [opcode for opcode, _ in exact_b]
        for tag, i, j, k, m in matched(exact_a, exact_b):
            if tag == "equal":
                yield from zip(a[i:j], b[k:m], strict=True)
                continue
            for inner, p, q, r, _ in matched(loose_a[i:j], loose_b[k:m]):
                if inner == "equal":
                    yield from zip(a[i + p : i + q], b[k + r : k + r + q - p], strict=True)


def matched(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[str, int, int, int, int]]:
    """difflib's opcodes from one sequence to the other, with what is alike at both ends taken off first."""
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    inner_a, inner_b = a[start : len(a) - end], b[start : len(b) - end]
    found = [("equal", 0, start, 0, start)] if start else []
    matcher = difflib.SequenceMatcher(None, inner_a, inner_b, autojunk=len(inner_a) * len(inner_b) > LARGE)
    found += [(tag, i + start, j + start, k + start, m + start) for tag, i, j, k, m in matcher.get_opcodes()]
    return found + ([("equal", len(a) - end, len(a), len(b) - end, len(b))] if end else [])


def _by_place(steps: Sequence[Step]) -> dict[tuple[str, str], list[int]]:
    """Positions of operators by phase and module path, in order."""
    found: dict[tuple[str, str], list[int]] = {}
    for position, step in enumerate(steps):
        found.setdefault((step.phase.name, step.op.path), []).append(position)
    return found


def _shape(place: tuple[str, str], positions: Sequence[int], steps: Sequence[Step]) -> Hashable:
    """What a path that was renamed keeps: its phase, its depth, and the operators it runs."""
    phase, path = place
    return phase, path.count("."), tuple(steps[i].op.opcode for i in positions)


def _storages(
    base: Sequence[Step],
    head: Sequence[Step],
    base_storages: Sequence[Storage],
    head_storages: Sequence[Storage],
    ops: Mapping[int, int],
) -> Iterator[tuple[str, str]]:
    made_a = {name for step in base for name in step.allocates}
    made_b = {name for step in head for name in step.allocates}
    ours = {s.name: s for s in base_storages}
    known_a: set[str] = set()
    known_b: set[str] = set()
    for storage in head_storages:
        if storage.name in ours and storage.name not in made_a and storage.name not in made_b:
            known_a.add(storage.name)
            known_b.add(storage.name)
            yield storage.name, storage.name
    for i, j in ops.items():
        one, two = base[i], head[j]
        for a, b in zip(one.op.results, two.op.results, strict=False):
            made = a.storage in one.allocates and b.storage in two.allocates
            if made and a.storage not in known_a and b.storage not in known_b:
                known_a.add(a.storage)
                known_b.add(b.storage)
                yield a.storage, b.storage
    belongs: dict[tuple[str, str], list[str]] = {}
    for storage in head_storages:
        if storage.of and storage.name not in known_b:
            belongs.setdefault((storage.kind, storage.of), []).append(storage.name)
    for storage in base_storages:
        found = belongs.get((storage.kind, storage.of)) if storage.of and storage.name not in known_a else None
        if found:
            yield storage.name, found.pop(0)
