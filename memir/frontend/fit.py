"""Where a symbol is lost: concrete traces at several points and one exact polynomial per size, verified at further points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd, lcm
from typing import TYPE_CHECKING

import sympy

from memir.errors import InconclusiveError
from memir.frontend.loops import collapse, find_loops, lengthened
from memir.ir.core import Op, Program, Value
from memir.ir.size import Size, floor_div

if TYPE_CHECKING:
    from memir.frontend.trace import Traced

_DEGREE = {"B": 1, "S": 2}  # a decoder's sizes are linear in B and at most quadratic in S


def _points(lost: dict[str, int], batch: int, seq: int) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """A grid that determines the polynomials, the asked point among it, and further points that verify them."""
    step = next((d for d in (256, 128, 64, 32, 16, 8, 4, 2) if seq % d == 0 and seq >= 4 * d), 1)
    axes = {
        "B": ([max(batch, 2), max(batch, 2) + 1], max(batch, 2) + 2),
        "S": (
            [seq, seq - step, seq - 2 * step] if seq > 3 * step else [seq, seq + step, seq + 2 * step],
            max(seq - 3 * step, 2),
        ),
    }
    names = sorted(lost)
    grid = [dict(zip(names, values, strict=True)) for values in product(*(axes[n][0] for n in names))]
    further = [{n: axes[n][1] for n in names}, {n: axes[n][0][-1] if n == "S" else axes[n][1] for n in names}]
    return grid, [p for i, p in enumerate(further) if p not in further[:i] and p not in grid]


def fit_programs(
    concrete: Callable[[dict[str, int], frozenset[str]], Traced],
    lost: dict[str, int],
    kept: frozenset[str],
    batch: int,
    seq: int,
) -> Traced:
    """The program with the lost symbols back. Raises InconclusiveError when the operators or the sizes do not generalize."""
    grid, further = _points(lost, batch, seq)
    traces = [concrete(point, kept) for point in [*grid, *further]]
    programs = [t.program for t in traces]
    names = sorted(lost)
    fit = _Fit(names, [tuple(p[n] for n in names) for p in [*grid, *further]], len(grid))
    first = traces[0]
    program = _merged(programs, fit)
    low = {n: min(p[n] for p in [*grid, *further]) for n in names}
    domain = tuple(c for c in first.program.domain if c.split(" ")[0] in kept) + tuple(f"{n} >= {low[n]}" for n in names)
    if fit.divided:
        steps = {n: gcd(*(p[n] - grid[0][n] for p in [*grid, *further])) for n in names}
        domain += tuple(f"{n} % {step} == {grid[0][n] % step}" for n, step in steps.items() if step > 1)
    return replace(first, program=replace(program, domain=domain, dims=("B", "S")), method="fit")


def loops_with_length(concrete: Callable[[dict[str, int], frozenset[str]], Traced], kept: frozenset[str]) -> Traced | None:
    """The program of a model that loops over tokens, with S back; None where the number of operators does not grow with S.

    Fitted through traces at S = 15, 16, 17, checked at 18, and the peak of every phase verified at 23. InconclusiveError
    where what grows is no loop, or is not exact.
    """
    first, *others = _LOOP_LENGTHS
    shorter = concrete({"S": first - 1}, kept).program
    traced = concrete({"S": first}, kept)
    if sum(len(p.ops) for p in shorter.phases) == sum(len(p.ops) for p in traced.program.phases):
        return None
    loops = find_loops(shorter, traced.program)
    programs = [collapse(traced.program, loops)]
    for length in others:
        program = concrete({"S": length}, kept).program
        programs.append(collapse(program, lengthened(loops, length - first)))
    fit = _Fit(["S"], [(length,) for length in _LOOP_LENGTHS], 3)
    program = _merged(programs, fit)
    whole = concrete({"S": _FURTHER}, kept).program
    for batch in (2, 5) if "B" in kept else (1,):
        env = {"B": batch, "S": _FURTHER}
        if _phase_peaks(program, env) != _phase_peaks(whole, env):
            raise InconclusiveError(f"a loop over tokens does not generalize: its peak at S={_FURTHER} is another")
    domain = (*(c for c in traced.program.domain if c.split(" ")[0] in kept), f"S >= {first}")
    return replace(traced, program=replace(program, domain=domain, dims=("B", "S")), method="fit")


_LOOP_LENGTHS, _FURTHER = (15, 16, 17, 18), 23


def _phase_peaks(program: Program, env: dict[str, int]) -> dict[str, int]:
    """The largest live bytes of each phase at a point."""
    nbytes = {s.name: s.nbytes.evaluate(env) for s in program.storages}
    live = {s.name for s in program.storages if s.live_in}
    now = sum(nbytes[name] for name in live)
    peaks: dict[str, int] = {}
    for phase, op in program.ops():
        for value in op.results:
            if value.storage not in live:
                live.add(value.storage)
                now += nbytes[value.storage]
        peaks[phase.name] = max(peaks.get(phase.name, 0), now + op.scratch.evaluate(env))
        live.difference_update(op.frees)
        now -= sum(nbytes[name] for name in op.frees)
    return peaks


class _Fit:
    """Interpolates sizes over the grid; every further point must agree."""

    def __init__(self, names: list[str], points: list[tuple[int, ...]], determined: int) -> None:
        exponents = list(product(*(range(_DEGREE[n] + 1) for n in names)))
        self.monomials = [self._monomial(names, e) for e in exponents]
        rows = [[sympy.prod(x**k for x, k in zip(point, e, strict=True)) for e in exponents] for point in points]
        self.inverse = sympy.Matrix(rows[:determined]).inv()
        self.rows, self.determined = rows, determined
        self.divided = False  # a size is a whole number only at multiples of what lay between the points
        self.size = lru_cache(maxsize=None)(self._size)

    @staticmethod
    def _monomial(names: list[str], exponents: tuple[int, ...]) -> Size:
        result = Size.of(1)
        for name, exponent in zip(names, exponents, strict=True):
            result = result * Size.of(name) ** exponent
        return result

    def _size(self, sizes: tuple[Size, ...]) -> Size:
        if all(s is sizes[0] for s in sizes):
            return sizes[0]
        total = Size()
        for monomial in {m for s in sizes for m, _ in s.terms}:
            samples = [dict(s.terms).get(monomial, 0) for s in sizes]
            coefficients = self.inverse * sympy.Matrix(samples[: self.determined])
            predicted = [sum(c * r for c, r in zip(coefficients, row, strict=True)) for row in self.rows]
            if predicted != samples:
                raise InconclusiveError(f"a size is no polynomial in the lost symbols: {samples} at the points traced")
            scale = lcm(*(int(c.q) for c in coefficients))
            self.divided |= scale > 1
            numerator = Size()
            for coefficient, lost in zip(coefficients, self.monomials, strict=True):
                numerator = numerator + lost * int(coefficient * scale)
            total = total + Size(((monomial, 1),)) * floor_div(numerator, scale)
        return total


def _merged(programs: list[Program], fit: _Fit) -> Program:
    first = programs[0]
    flat = [list(p.ops()) for p in programs]
    if len({tuple(op.opcode for _, op in ops) for ops in flat}) != 1 or len({len(p.storages) for p in programs}) != 1:
        raise InconclusiveError("the operators change with B or S: no one formula holds")
    storages = tuple(
        replace(group[0], nbytes=fit.size(tuple(s.nbytes for s in group)))
        for group in zip(*(p.storages for p in programs), strict=True)
    )
    values = tuple(_value(group, fit) for group in zip(*(p.values for p in programs), strict=True))
    merged = iter([_op(tuple(op for _, op in group), fit) for group in zip(*flat, strict=True)])
    phases = tuple(replace(phase, ops=tuple(next(merged) for _ in phase.ops)) for phase in first.phases)
    return replace(first, storages=storages, values=values, phases=phases)


def _op(group: tuple[Op, ...], fit: _Fit) -> Op:
    if len({(op.frees, op.drops, op.saves, tuple(v.storage for v in op.results)) for op in group}) != 1:
        raise InconclusiveError("what is freed changes with B or S: no one formula holds", where=group[0].source)
    results = tuple(_value(values, fit) for values in zip(*(op.results for op in group), strict=True))
    return replace(group[0], results=results, scratch=fit.size(tuple(op.scratch for op in group)))


def _value(group: tuple[Value, ...], fit: _Fit) -> Value:
    if len({len(v.shape) for v in group}) != 1:
        raise InconclusiveError("the rank of a tensor changes with B or S", where=group[0].name)
    shape = tuple(fit.size(extents) for extents in zip(*(v.shape for v in group), strict=True))
    strides = tuple(fit.size(extents) for extents in zip(*(v.strides for v in group), strict=True))
    return replace(group[0], shape=shape, strides=strides, offset=fit.size(tuple(v.offset for v in group)))
