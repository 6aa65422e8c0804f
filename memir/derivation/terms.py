"""What a formula's terms are made of: the tensors that are alive at a point, as polynomials, each with its origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.frames import Frame, Frames
from memir.analysis.inventory import alive_at, collapse
from memir.analysis.liveness import LiveRange, live_ranges
from memir.analysis.peak import START
from memir.errors import MemirError
from memir.ir.core import Kind, Program
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ZERO, Monomial, Size, floor_div

Key = tuple[str, str, str, str, str]  # kind, operator, module, source, dtype


@dataclass(frozen=True, slots=True)
class Row:
    """Storages of one kind and dtype that one operator makes at one source line, layers taken together."""

    size: Size  # bytes of all of them
    count: Size  # how many
    kind: str
    op: str  # empty for what is alive before the step
    module: str
    source: str
    dtype: str

    @property
    def elements(self) -> Size:
        """How many elements they have; their bytes where those are not whole (a workspace)."""
        width = ITEMSIZE.get(self.dtype, 1)
        return self.size.exact_div(width) if all(c % width == 0 for _, c in self.size.terms) else self.size

    @property
    def origin(self) -> str:
        """`mlp.up_proj: mm` within a layer, `loss_utils.py:42: _log_softmax` outside of them, or the parameter's name."""
        name = self.op.removeprefix("aten.").partition(".")[0]
        module = self.module.rpartition("*.")[2].removeprefix("model.").removeprefix("transformer.")
        module = module or self.source.rpartition("/")[2]
        kind = {"gradient": "gradient of ", "optimizer_state": "state of "}.get(self.kind, "") if not name else ""
        text = f"{module}: {name}" if module and name else module or name
        return f"{kind}{text}"


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one row adds to one term."""

    coefficient: int
    row: Row


@dataclass(frozen=True, slots=True)
class Term:
    """One monomial of a polynomial, and the rows that make it."""

    monomial: Monomial
    coefficient: int
    parts: tuple[Contribution, ...]

    @property
    def size(self) -> Size:
        """The term."""
        return Size(((self.monomial, self.coefficient),))


class Inventory:
    """Rows at any point of a program's timeline."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self._ranges = [live_ranges(frame.program) for frame in frames.frames]
        self._dtypes = [_dtypes(frame.program) for frame in frames.frames]

    def at(self, index: int, keep: Callable[[LiveRange], bool] | None = None) -> tuple[Row, ...]:
        """The rows of what is alive while step `index` of the timeline runs (START: before the first), its workspace too.

        With `keep` only some storages, and no workspace.
        """

        def alive(frame: Frame, ranges: Mapping[str, LiveRange]) -> list[LiveRange]:
            position = START if index == START else frame.positions[index]
            return [live for name in alive_at(frame.program, frame.line, position) if chosen(live := ranges[name])]

        chosen = keep or _everything
        columns = [
            _grouped(frame, alive(frame, ranges), dtypes)
            for frame, ranges, dtypes in zip(self.frames.frames, self._ranges, self._dtypes, strict=True)
        ]
        if index != START and keep is None:
            for frame, column in zip(self.frames.frames, columns, strict=True):
                op = frame.line.steps[frame.positions[index]].op
                if op.scratch.terms:
                    key = (str(Kind.WORKSPACE), op.opcode, collapse(op.path), op.source, "")
                    column[key] = (op.scratch, Size.of(1))
        return self._rows(columns)

    def after(self, index: int, keep: Callable[[LiveRange], bool]) -> tuple[Row, ...]:
        """The rows of what is alive after step `index`."""
        return self._rows(self._after(index, keep))

    def each_more(self, index: int, keep: Callable[[LiveRange], bool]) -> tuple[Row, ...]:
        """What of `after` one more repetition (a unit of layers) adds; all of it where nothing repeats."""
        columns = self._after(index, keep)
        if len(columns) == 1:
            return self._rows(columns)
        low, high = columns[:2]
        zero = (ZERO, ZERO)
        rows = []
        for key in dict.fromkeys([*low, *high]):
            (size, count), (more, counted) = low.get(key, zero), high.get(key, zero)
            rows.append(Row(more - size, counted - count, *key))
        return _sorted(row for row in rows if row.size.terms)

    def _after(self, index: int, keep: Callable[[LiveRange], bool]) -> list[dict[Key, tuple[Size, Size]]]:
        columns = []
        for frame, ranges, dtypes in zip(self.frames.frames, self._ranges, self._dtypes, strict=True):
            position = frame.positions[index]
            dead = set(frame.line.steps[position].frees)
            names = [name for name in alive_at(frame.program, frame.line, position) if name not in dead]
            columns.append(_grouped(frame, [live for name in names if keep(live := ranges[name])], dtypes))
        return columns

    def _rows(self, columns: Sequence[Mapping[Key, tuple[Size, Size]]]) -> tuple[Row, ...]:
        zero = (ZERO, ZERO)
        rows = []
        for key in dict.fromkeys(key for column in columns for key in column):
            sizes, counts = zip(*(column.get(key, zero) for column in columns), strict=True)
            rows.append(Row(self._extended(sizes), self._extended(counts), *key))
        return _sorted(row for row in rows if row.size.terms)

    def _extended(self, sizes: Sequence[Size]) -> Size:
        """A size at any number of repetitions from those in each frame."""
        total = sizes[0]
        for (symbol, low, step), size in zip(self.frames.axes, sizes[1:], strict=True):
            more = Size.of(symbol) - low
            total = total + (floor_div(more, step) if step > 1 else more) * (size - sizes[0])
        return total


def _everything(live: LiveRange) -> bool:
    return True


def rows_of_point(inventory: Inventory, index: int, expected: Size) -> tuple[Row, ...]:
    """The rows at a point; MemirError unless they sum to its live bytes."""
    rows = inventory.at(index)
    total = sum((row.size for row in rows), start=ZERO)
    if total is not expected:
        raise MemirError(f"the tensors alive there have {total} bytes, and the formula {expected}")
    return rows


def terms_of(rows: Iterable[Row], order: Callable[[Size], int]) -> tuple[Term, ...]:
    """The rows by the monomials of their sum, largest first as `order` puts them; terms that cancel fall away."""
    parts: dict[Monomial, list[Contribution]] = {}
    for row in rows:
        for monomial, coefficient in row.size.terms:
            parts.setdefault(monomial, []).append(Contribution(coefficient, row))
    found = []
    for monomial, made in parts.items():
        total = sum(part.coefficient for part in made)
        if total:
            made.sort(key=lambda part: (-abs(part.coefficient), part.row.origin))
            found.append(Term(monomial, total, tuple(made)))
    return tuple(sorted(found, key=lambda term: (-order(term.size), term.size.text())))


def _grouped(frame: Frame, alive: Iterable[LiveRange], dtypes: Mapping[str, str]) -> dict[Key, tuple[Size, Size]]:
    found: dict[Key, tuple[Size, Size]] = {}
    for live in alive:
        storage = live.storage
        dtype = dtypes.get(storage.name, "")
        if live.made is None:
            key = (str(storage.kind), "", collapse(storage.of or storage.name), "", dtype)
        else:
            op = frame.line.steps[live.made].op
            key = (str(storage.kind), op.opcode, collapse(op.path), op.source, dtype)
        size, count = found.get(key, (ZERO, ZERO))
        found[key] = (size + storage.nbytes, count + 1)
    return found


def _dtypes(program: Program) -> dict[str, str]:
    """The dtype of the first tensor in each storage."""
    found: dict[str, str] = {}
    for value in program.values:
        found.setdefault(value.storage, value.dtype)
    for _, op in program.ops():
        for value in op.results:
            found.setdefault(value.storage, value.dtype)
    return found


def _sorted(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (row.kind, row.module, row.op, row.source, row.dtype)))
