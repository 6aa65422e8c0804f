"""Which kept program answers a question: the same target and options, nothing read has changed, and a point where it holds.

The answer of a hit is the answer that a trace would give, to the letter: the same program, domain, assumptions. That is what
`Place.answers` decides; when it is in doubt the step is traced.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memir.cache import environment
from memir.cache.manifest import Manifest
from memir.cache.record import Record, from_text, to_text
from memir.cache.store import DamagedError, Store, cache_folder
from memir.cache.watch import Watch
from memir.errors import MemirError
from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.domain import Condition
from memir.ir.size import Size
from memir.recipe import Recipe

# Up to here the lengths that a domain allows are found by looking through the same ones, whatever length was asked
# (memir.frontend.domains: to 8,192, or to twice the asked length).
_SAME_REACH = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kept program was traced, and what decides where else it may answer."""

    batch: int
    seq: int
    max_seq: int | None
    only_here: bool
    dims: tuple[tuple[str, int], ...]
    domain: tuple[str, ...]
    general: tuple[str, ...] | None  # the domain of the general program, if there is one

    def answers(self, batch: int, seq: int | None, default_seq: int) -> dict[str, int] | None:
        """The point that is asked about, if a trace there would give this very program; else None.

        A size of 1 is traced apart, so it answers for no other. Bounds and remainders of S may be told otherwise for long
        sequences. Longer sequences than the model accepts are for the loader to refuse.
        """
        if seq is None:
            seq = min(default_seq, self.max_seq or default_seq)
        if self.max_seq is not None and seq > self.max_seq:
            return None
        here = (batch, seq) == (self.batch, self.seq)
        if not here and (self.only_here or (batch == 1) != (self.batch == 1) or (seq == 1) != (self.seq == 1)):
            return None
        if not here and not self._holds(batch, seq):
            return None
        return {"B": batch, "S": seq}

    def _holds(self, batch: int, seq: int) -> bool:
        dims = dict(self.dims)
        asked = {**dims, "B": batch, "S": seq}
        symbolic = {**dims, "B": max(batch, 2), "S": max(seq, 2)}  # where a general program is traced
        for domain, point in ((self.domain, asked), (self.general or (), symbolic)):
            for text in domain:
                condition = Condition.read(text)
                if condition is None or condition.holds(point) is not True:
                    return False
                if condition.sign not in (">=", "!=") and seq != self.seq and max(seq, self.seq) > _SAME_REACH:
                    return False
        return True


class Lookup:
    """The kept programs of one target with its options."""

    def __init__(self, store: Store, key: str, watch: Watch, relative: bool, signature: dict[str, object]) -> None:
        self.store, self.key, self.watch, self.relative, self.signature = store, key, watch, relative, signature

    def find(self, batch: int, seq: int | None, default_seq: int) -> tuple[Record, dict[str, int]] | None:
        """A record that answers there, and the point with its defaults; None if there is none."""
        known: dict[str, bool] = {}  # a manifest's text -> whether it holds
        for entry in self.store.entries(self.key):
            try:
                header = json.loads(entry.header)
                point = _place(header["place"]).answers(batch, seq, default_seq)
                if point is None:
                    continue
                text = json.dumps(header["manifest"])
                if text not in known:
                    known[text] = Manifest.from_data(header["manifest"]).holds()
                if not known[text]:
                    continue
                record = from_text(entry.record())
            except (DamagedError, MemirError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.store.report_damage(entry.path)
                continue
            self.store.used(entry.path)
            return record, point
        return None

    def keep(self, record: Record, point: Mapping[str, int]) -> None:
        """Write what was traced while `watch` was entered; nothing is kept if some of what was read is changing."""
        manifest = self.watch.manifest(relative=self.relative) if environment.is_settled(self.signature) else None
        if manifest is None:
            return
        try:
            text = to_text(record)
        except ValueError:  # a program without a text form
            return
        general = record.general
        place = Place(
            point["B"],
            point["S"],
            record.max_seq,
            record.method != "symbolic" or bool(record.inconclusive) or _is_special(record, point["B"], point["S"]),
            record.dims,
            record.program.domain,
            None if general is None else general.domain,
        )
        header = json.dumps({"place": asdict(place), "manifest": manifest.to_data()})
        state = hashlib.sha256(json.dumps(manifest.to_data()).encode()).hexdigest()[:16]
        self.store.save(self.key, f"{place.batch}-{place.seq}-{state}", header, text)


def open_lookup(target: str, recipe: Recipe, sets: Mapping[str, str], inputs: str | None, trust: bool) -> Lookup | None:
    """The kept programs for a target as it is typed; None where nothing is kept (MEMIR_NO_CACHE, or a target without files)."""
    if os.environ.get("MEMIR_NO_CACHE", "") not in ("", "0"):
        return None
    try:
        places = _places(target)
        signature = environment.signature()
        relative = any(kind for _, kind in places) or ":" in target
        question = {
            "target": target,
            "places": [[path, kind] for path, kind in places if relative],
            "cwd": os.getcwd() if relative else None,
            "recipe": asdict(recipe),
            "sets": list(sets.items()),
            "inputs": inputs,
            "trust": trust,
            "environment": signature,
        }
        head, folder = target.rpartition(":")[0], cache_folder()
        if head == "__main__" or not folder.is_absolute():  # code that may come from anywhere; a user without a home
            return None
        key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return Lookup(Store(folder), key[:40], Watch([head.partition(".")[0]] if head else []), relative, signature)
    except (OSError, ValueError):  # no working directory, or a target that cannot be a path: the loader says what is wrong
        return None


def _places(target: str) -> list[tuple[str, str]]:
    """The paths that the target may mean, and what lies there: the loader decides by it what the target is."""
    found = []
    for text in dict.fromkeys((target, target.rpartition(":")[0])):
        if text:
            path = Path(text).expanduser()
            found.append((str(path.absolute()), "folder" if path.is_dir() else "file" if path.is_file() else ""))
    return found


def _place(data: Any) -> Place:
    return Place(
        batch=int(data["batch"]),
        seq=int(data["seq"]),
        max_seq=data["max_seq"],
        only_here=bool(data["only_here"]),
        dims=tuple((str(name), int(value)) for name, value in data["dims"]),
        domain=tuple(map(str, data["domain"])),
        general=None if data["general"] is None else tuple(map(str, data["general"])),
    )


def _is_special(record: Record, batch: int, seq: int) -> bool:
    """Whether a trace at this point may have met a size of the model's own (S as long as a table, B*S as wide as a layer).

    PyTorch takes such a point apart (`S != 768`); where the same program holds there, its domain is told without the exception,
    unlike at other points.
    """
    if seq > 1 and seq == record.max_seq:
        return True
    own = {size.constant for program in (record.program, record.general) if program is not None for size in _extents(program)}
    return bool(own & {value for value in (batch, batch * seq, seq - 1, seq, seq + 1) if value > 2})


def _extents(program: Program) -> Iterator[Size]:
    """Every extent and stride that is a number."""
    for value in [*program.values, *(value for phase in program.phases for value in _results(phase.ops))]:
        for size in (*value.shape, *value.strides):
            if size.is_constant:
                yield size


def _results(ops: Iterable[Op | Repeat]) -> Iterator[Value]:
    for op in ops:
        if isinstance(op, Repeat):
            yield from _results(op.body)
        else:
            yield from op.results
