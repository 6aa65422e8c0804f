"""Liveness: which storages are alive at every operator, and how many bytes that is as a polynomial.

The rules (docs/memory-model.md has the source of each). Before the first operator the `live_in` storages are alive. An
operator allocates the storages of its results that are not alive yet; while it runs its `scratch` bytes are live besides them;
after it its `frees` die. Only storages on one device count ("gpu" unless asked otherwise).

Everything here is one walk with integer arithmetic: a live-byte polynomial is a tuple of coefficients over a fixed basis of
monomials, so 100,000 operators take about a second, and a `Size` is built only for a point that somebody asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm, prod
from typing import NamedTuple

from memir.errors import InconclusiveError, UsageError, VerifyError
from memir.ir.core import Op, Phase, Program, Repeat, Storage
from memir.ir.names import rename_path
from memir.ir.size import Monomial, Size, monomial_value
from memir.ir.unroll import extents, has_repeats, unroll

Vector = tuple[int, ...]


class Step(NamedTuple):
    """One operator of a flat program in order, with what it allocates."""

    phase: Phase
    op: Op
    allocates: tuple[str, ...]  # storages of its results that were not alive before
    frees: tuple[str, ...]  # its frees on the device that is counted


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes at every point of a program, as polynomials.

    `running[i]` and `after[i]` are positions in `points` for operator i (counted from 0 over all phases); `start` is the one
    before the first operator. Points that share a polynomial share a position. A point is its coefficients over `basis`, in
    bytes; `size(p)` makes it a Size.
    """

    steps: tuple[Step, ...]
    basis: tuple[Monomial, ...]
    points: tuple[Vector, ...]
    start: int
    running: tuple[int, ...]
    after: tuple[int, ...]

    def size(self, point: int) -> Size:
        """The polynomial of a point, in bytes."""
        return Size(zip(self.basis, self.points[point], strict=True))

    def bind(self, env: Mapping[str, int]) -> Timeline:
        """The timeline with these symbols as numbers, in module paths too. ValueError where a shard's bytes are not whole."""
        below = [[env[a] ** -e for a, e in m if e < 0 and isinstance(a, str) and a in env] for m in self.basis]
        common = lcm(*(prod(factors) for factors in below))
        products = [Size(((monomial, common),)).substitute(env) for monomial in self.basis]
        basis = basis_of(products)
        place = {monomial: k for k, monomial in enumerate(basis)}
        terms = [[(place[m], c) for m, c in product.terms] for product in products]
        seen: dict[Vector, int] = {}
        moved = []
        for point in self.points:
            vector = [0] * len(basis)
            for coefficient, product in zip(point, terms, strict=True):
                if coefficient:
                    for k, c in product:
                        vector[k] += c * coefficient
            if common > 1:
                if any(c % common for c in vector):
                    raise ValueError(f"{self.size(self.points.index(point))} bytes are not whole numbers at {dict(env)}")
                vector = [c // common for c in vector]
            moved.append(seen.setdefault(tuple(vector), len(seen)))
        steps = tuple(
            step._replace(op=replace(step.op, path=rename_path(step.op.path, env))) if "{" in step.op.path else step
            for step in self.steps
        )
        return Timeline(
            steps,
            basis,
            tuple(seen),
            moved[self.start],
            tuple(moved[p] for p in self.running),
            tuple(moved[p] for p in self.after),
        )

    def evaluate(self, env: Mapping[str, int]) -> Numbers:
        """The same in whole bytes at `env`. UsageError if a symbol lacks there, InconclusiveError if bytes are not whole."""
        values = evaluate_points(self.basis, self.points, env)
        return Numbers(values[self.start], tuple(values[p] for p in self.running), tuple(values[p] for p in self.after))


class Numbers(NamedTuple):
    """Live bytes before the first operator, while each operator runs, and after each."""

    start: int
    running: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The largest of all points."""
        return max(self.start, max(self.running, default=0))


@dataclass(frozen=True, slots=True)
class LiveRange:
    """When a storage lives. Positions count operators from 0; None stands for the step's start or end."""

    storage: Storage
    made: int | None  # the operator that allocates it; None: alive before the first (live_in), or never allocated
    freed: int | None  # the operator after which it dies; None: alive at the end
    last_use: int | None  # the last operator that reads or writes it (its maker included); None: never used
    dropped: int | None = None  # where Python let go of it while autograd still held it
    saved: int | None = None  # the operator because of which autograd keeps it

    def alive_at(self, op: int) -> bool:
        """Whether it is alive while operator `op` runs."""
        if self.made is None and not self.storage.live_in:
            return False
        return (self.made is None or self.made <= op) and (self.freed is None or self.freed >= op)


def flatten(program: Program) -> Program:
    """The program without Repeats and families. InconclusiveError where a count is a symbol: such layers cannot be walked."""
    if not has_repeats(program):
        return program
    flat = unroll(program)
    if has_repeats(flat):
        counts = {str(op.count) for phase in flat.phases for op in phase.ops if isinstance(op, Repeat)}
        counts |= {str(n) for storage in flat.storages for n in extents(storage.name)}
        raise InconclusiveError(
            f"live bytes are not computed for a number of repetitions that is a symbol: {', '.join(sorted(counts))}",
            where=f"program @{program.name}",
            hint="give it a value first (`bind` in memir.ir.unroll)",
        )
    return flat


def walk(program: Program, device: str = "gpu") -> tuple[Step, ...]:
    """Every operator in order with the storages it allocates and frees on `device`.

    VerifyError where a storage is allocated a second time, freed while it is not alive, or not declared.
    """
    program = flatten(program)
    here = {s.name for s in program.storages if s.device == device}
    elsewhere = {s.name for s in program.storages} - here
    alive = {s.name for s in program.storages if s.live_in and s.device == device}
    gone: set[str] = set()
    steps = []
    for index, (phase, op) in enumerate(program.ops()):
        allocates: list[str] = []
        for value in op.results:
            name = value.storage
            if name in alive or name in elsewhere:
                continue
            if name in gone or name not in here:
                what = "is allocated again after it was freed" if name in gone else "is not declared"
                raise _broken(f"storage ${name} {what}", program, index, op)
            alive.add(name)
            allocates.append(name)
        frees = op.frees if not elsewhere else tuple(name for name in op.frees if name not in elsewhere)
        for name in frees:
            if name not in alive:
                raise _broken(f"storage ${name} is freed while it is not alive", program, index, op)
            alive.discard(name)
            gone.add(name)
        steps.append(Step(phase, op, tuple(allocates), frees))
    return tuple(steps)


def _broken(message: str, program: Program, index: int, op: Op) -> VerifyError:
    place = " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))
    return VerifyError(message, where=f"program @{program.name}, operator {index}: {place}")


def timeline(program: Program, device: str = "gpu") -> Timeline:
    """Live bytes at every point as polynomials. Repeats with numeric counts are unrolled; where a count is a symbol, the steps
    are the operators outside of the Repeats, and those of a body twice: in its first iteration and in its last
    (`memir.analysis.frames`)."""
    if is_folded(program):
        from memir.analysis.frames import frames_of

        return frames_of(program, device)[1]
    return flat_timeline(flatten(program), device)


def is_folded(program: Program) -> bool:
    """Whether a number of repetitions or of a family's members is a symbol."""
    counts = [op.count for phase in program.phases for op in phase.ops if isinstance(op, Repeat)]
    names = [s.name for s in program.storages] + [v.name for v in program.values]
    counts += [n for name in names for n in extents(name)]
    return any(not count.is_constant for count in counts)


def flat_timeline(program: Program, device: str = "gpu") -> Timeline:
    """`timeline` of a program without Repeats."""
    steps = walk(program, device)
    sizes = {s.name: s.nbytes for s in program.storages if s.device == device}
    basis = basis_of([*sizes.values(), *(step.op.scratch for step in steps)])
    position = {monomial: i for i, monomial in enumerate(basis)}
    sparse: dict[Size, tuple[tuple[int, int], ...]] = {}  # a Size's terms as (position, coefficient); sizes are interned

    def terms(size: Size) -> tuple[tuple[int, int], ...]:
        found = sparse.get(size)
        if found is None:
            found = sparse[size] = tuple((position[m], c) for m, c in size.terms)
        return found

    live = [0] * len(basis)
    for storage in program.storages:
        if storage.live_in and storage.device == device:
            for i, c in terms(storage.nbytes):
                live[i] += c
    seen: dict[Vector, int] = {}
    start = seen.setdefault(tuple(live), 0)
    running, after = [], []
    for step in steps:
        for name in step.allocates:
            for i, c in terms(sizes[name]):
                live[i] += c
        point = tuple(live)
        if step.op.scratch.terms:
            busy = live.copy()
            for i, c in terms(step.op.scratch):
                busy[i] += c
            running.append(seen.setdefault(tuple(busy), len(seen)))
        else:
            running.append(seen.setdefault(point, len(seen)))
        for name in step.frees:
            for i, c in terms(sizes[name]):
                live[i] -= c
        after.append(seen.setdefault(tuple(live), len(seen)) if step.frees else seen.setdefault(point, len(seen)))
    return Timeline(steps, basis, tuple(seen), start, tuple(running), tuple(after))


def basis_of(sizes: Iterable[Size]) -> tuple[Monomial, ...]:
    """The monomials of some sizes, each once, in a fixed order."""
    total: dict[Monomial, int] = {}
    for size in dict.fromkeys(sizes):
        for monomial, _ in size.terms:
            total[monomial] = 1
    return tuple(m for m, _ in Size(total.items()).terms)


def evaluate_points(basis: Sequence[Monomial], points: Sequence[Vector], env: Mapping[str, int]) -> list[int]:
    """The points' values in bytes. UsageError where a symbol has no value, InconclusiveError where they are not whole."""
    values: list[int | Fraction] = []
    for monomial in basis:
        try:
            values.append(monomial_value(monomial, env))
        except KeyError as error:
            raise UsageError(f"no value is given for the symbol {error.args[0]}") from None
    numbers = []
    for point in points:
        number = sum(c * v for c, v in zip(point, values, strict=True) if c)
        if isinstance(number, Fraction):
            if number.denominator != 1:
                at = ", ".join(f"{k}={v}" for k, v in sorted(env.items()))
                size = Size(zip(basis, point, strict=True))
                raise InconclusiveError(f"{size} is not a whole number of bytes at {at}")
            number = int(number)
        numbers.append(number)
    return numbers


def live_ranges(program: Program) -> dict[str, LiveRange]:
    """Every storage's live range by name, in declared order, on every device."""
    program = flatten(program)
    of = {v.name: v.storage for v in program.values}
    made: dict[str, int] = {}
    freed: dict[str, int] = {}
    used: dict[str, int] = {}
    dropped: dict[str, int] = {}
    saved: dict[str, int] = {}
    live_in = {s.name for s in program.storages if s.live_in}
    for index, (_, op) in enumerate(program.ops()):
        for value in op.results:
            of[value.name] = value.storage
            used[value.storage] = index
            if value.storage not in live_in:
                made.setdefault(value.storage, index)
        for operand in op.operands:
            if operand not in of:
                raise _broken(f"value %{operand} is used before it is made", program, index, op)
            used[of[operand]] = index
        for name in op.frees:
            freed[name] = index
        for name in op.drops:
            dropped[name] = index
        for name in op.saves:
            saved.setdefault(name, index)
    return {
        s.name: LiveRange(s, made.get(s.name), freed.get(s.name), used.get(s.name), dropped.get(s.name), saved.get(s.name))
        for s in program.storages
    }
