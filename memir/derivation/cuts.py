"""The step with the cut as a symbol: which program holds for which number of frozen leading layers, as few as can be proved.

Near the ends a cut has a program of its own (`memir.cuts.programs`). It is that of the middle cuts where both allocate and free
alike, and where no operator that the middle program then runs zero times could be taken for its peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from memir.analysis.domain import Range, program_ranges
from memir.analysis.dominance import Comparer, prune
from memir.analysis.frames import frames_of
from memir.analysis.liveness import basis_of
from memir.analysis.peak import coefficients
from memir.cuts.plan import flat_sample, leaves_something
from memir.cuts.programs import programs
from memir.derivation.bounds import CUT, DEPTH, Cuts
from memir.derivation.derive import Derivation, Quantity
from memir.derivation.step import WideStep
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.domain import Condition
from memir.ir.size import Size
from memir.ir.unroll import bind, has_repeats, unroll
from memir.rewrite.cut import Prefix, frozen_prefix
from memir.rewrite.depths import stride
from memir.rewrite.flow import Flow
from memir.rewrite.prune import without_gradients

FAR = 4096  # layers


def by_cut(step: WideStep) -> tuple[WideStep, ...]:
    """The step with c leading layers and what runs before them frozen: one step for each range of c, in their order.

    InconclusiveError where the layers do not repeat, so that there is no formula in the depth.
    """
    program, depth = step.program, step.env.get(DEPTH, 0)
    if DEPTH not in program.dims or not has_repeats(program):
        message = "the cut stays a number: the layers of this step are no Repeat over the depth L"
        raise InconclusiveError(message, hint="give the number of frozen layers:  --freeze 4")
    last = depth if leaves_something(Prefix(Flow(flat_sample(program))), True, False) else depth - 1
    group = stride(program)
    found: list[tuple[Cuts, Program]] = []
    for cuts, lifted in programs(program, step.env, range(last + 1), depth=depth, embeddings=True, head=False, symbol=CUT):
        one = lifted.program
        if not cuts:  # a model of so few layers that each cut is near an end
            continue
        if not has_repeats(one):
            message = f"the cut stays a number: a model of {depth} layers is too small for a formula in the cut"
            raise InconclusiveError(message, hint="give the number of frozen layers:  --freeze 1")
        found.append((_bounds(cuts, depth, group if CUT in one.dims else 1), one))
    found = _merged(found, depth)
    step = replace(step, recipe=(*step.recipe, ("frozen", f"{CUT} layers frozen")))
    return tuple(_step(step, cuts, one, depth) for cuts, one in sorted(found, key=lambda f: f[0].low.evaluate({DEPTH: depth})))


def at_cut(step: WideStep, cut: int) -> WideStep:
    """The step with that many leading layers and what runs before them frozen, over the depth where it is not too near.

    UsageError where the model has fewer layers, or nothing is left to train.
    """
    if not cut:
        return step
    step = replace(step, recipe=(*step.recipe, ("frozen", f"{cut} layers frozen" if cut > 1 else "1 layer frozen")))
    program, depth = step.program, step.env.get(DEPTH)
    if depth is None or DEPTH not in program.dims:
        flow = Flow(unroll(program))
        new, _ = without_gradients(flow, *frozen_prefix(flow, cut, embeddings=True, head=False))
        return replace(step, program=new)
    if cut > depth:
        raise UsageError(f"--freeze {cut}: the model has {depth} layers", hint=f"a cut is 0 to {depth}")
    env = {name: step.env[name] for name in program.dims}
    found = programs(program, env, range(cut, cut + 1), depth=depth, embeddings=True, head=False, symbol=CUT)
    new = next(one.program for cuts, one in found if cut in cuts)
    if CUT in new.dims:
        return replace(step, program=bind(new, {CUT: cut}))
    if 2 * cut <= depth and DEPTH in new.dims:
        return replace(step, program=new)
    new = bind(new, {DEPTH: depth}) if DEPTH in new.dims else new
    reason = f"{DEPTH} = {depth}: with {cut} layers frozen the rest of them are too few to repeat"
    return replace(step, program=new, numbers=(*step.numbers, reason), env={n: v for n, v in step.env.items() if n != DEPTH})


def in_cases(derivations: Sequence[Derivation], name: str) -> list[Quantity]:
    """One quantity for each range of the cut; ranges in which it is the same formula, one polynomial, are put together."""
    found: list[Quantity] = []
    for derivation in derivations:
        quantity = replace(derivation.quantity(name), cuts=derivation.shown.step.cuts)
        if found and (both := _together(found[-1], quantity)) is not None:
            found[-1] = both
        else:
            found.append(quantity)
    return found


def _together(first: Quantity, second: Quantity) -> Quantity | None:
    """The quantity of both ranges where one polynomial is both."""
    a, b = first.cuts, second.cuts
    if a is None or b is None or len(first.parts) > 1 or len(second.parts) > 1 or a.group > 1 or b.group > 1:
        return None
    whole, other = (first, second) if a.low is not a.high or b.low is b.high else (second, first)
    at = Size.of(CUT) if other.cuts is None or other.cuts.low is not other.cuts.high else other.cuts.low
    for ours, theirs in (([whole.parts[0].size], [other.parts[0].size]), (whole.every, other.every)):
        if {size.substitute({CUT: at}) for size in ours} != {size.substitute({CUT: at}) for size in theirs}:
            return None
    return replace(whole, cuts=replace(a, high=b.high))


def _bounds(cuts: Sequence[int], depth: int, group: int) -> Cuts:
    low, high = cuts[0], cuts[-1]
    if low == high and group == 1 and len(cuts) == 1:
        size = _place(low, depth)
        return Cuts(size, size)
    return Cuts(Size.of(low), Size.of(DEPTH) - (depth - high), group, low % group)


def _place(cut: int, depth: int) -> Size:
    """Counted from the nearer end, as `programs` does."""
    return Size.of(cut) if cut <= depth - cut else Size.of(DEPTH) - (depth - cut)


def _step(step: WideStep, cuts: Cuts, program: Program, depth: int) -> WideStep:
    """The step for some cuts; at the target's point the cut is the one of them that is next to half of the layers."""
    inside = [cut for cut in range(depth + 1) if cuts.holds(cut, depth)]
    cut = min(inside, key=lambda c: (abs(2 * c - depth), c))
    dims = tuple(dict.fromkeys((*program.dims, CUT)))
    return replace(step, program=replace(program, dims=dims), env={**step.env, CUT: cut}, cuts=cuts)


def _merged(found: Sequence[tuple[Cuts, Program]], depth: int) -> list[tuple[Cuts, Program]]:
    """Fewer programs: those of one cut given to the middle program that they continue."""
    middles = [f for f in found if CUT in f[1].dims]
    single = {cuts.low: (cuts, one) for cuts, one in found if CUT not in one.dims}
    merged = []
    for cuts, middle in middles:
        while (low := cuts.low - cuts.group) in single and _is_same(middle, low, single[low][1]):
            cuts = replace(cuts, low=low)
            del single[low]
        while (high := cuts.high + cuts.group) in single and _is_same(middle, high, single[high][1]):
            cuts = replace(cuts, high=high)
            del single[high]
        merged.append((cuts, middle))
    return [*merged, *single.values()]


def _is_same(middle: Program, cut: Size, single: Program) -> bool:
    """Whether the middle program at a cut is the program for that cut, and its formulas hold there."""
    for depth in islice(_depths(single), 2):
        here = {DEPTH: depth, CUT: cut.evaluate({DEPTH: depth})}
        try:
            ours = _events(unroll(replace(middle, domain=()), here))
        except UsageError:  # a stretch that would run less than zero times
            return False
        if ours != _events(unroll(replace(single, domain=()), {DEPTH: depth})):
            return False
    general = [size.substitute({CUT: cut}) for size in _points(middle)]
    theirs = _points(single)
    if not set(theirs) <= set(general):
        return False
    points = list(dict.fromkeys([*theirs, *general]))
    basis = basis_of(points)
    ranges = program_ranges(single)
    for symbol in sorted({symbol for size in points for symbol in size.symbols()}):
        ranges.setdefault(symbol, Range())
    kept = prune([coefficients(size, basis) for size in points], Comparer(basis), tuple(ranges.items()))
    return {points[place] for place in kept} <= set(theirs)


def _points(program: Program) -> list[Size]:
    """The live bytes of every point."""
    _, line = frames_of(program)
    return list(dict.fromkeys([line.size(line.start), *(line.size(point) for point in line.running)]))


def _depths(program: Program) -> Iterator[int]:
    conditions = [c for t in program.domain if (c := Condition.read(t)) is not None and c.symbols() == {DEPTH}]
    return (n for n in range(1, FAR) if all(c.holds({DEPTH: n}) for c in conditions))


def _events(program: Program) -> list[tuple[object, ...]]:
    """What each operator of a flat program allocates and frees, by kind and size."""
    known = {storage.name: (str(storage.kind), storage.nbytes) for storage in program.storages}
    live = {storage.name for storage in program.storages if storage.live_in}
    events: list[tuple[object, ...]] = [tuple(sorted(_texts(known[name] for name in live)))]
    for phase, op in program.ops():
        made = [r.storage for r in op.results if r.storage not in live]
        live |= set(made)
        live -= set(op.frees)
        freed = sorted(_texts(known[name] for name in op.frees))
        events.append((phase.name, op.opcode, op.scratch, tuple(_texts(known[name] for name in made)), tuple(freed)))
    return events


def _texts(known: Iterable[tuple[str, Size]]) -> list[tuple[str, str]]:
    return [(kind, size.text()) for kind, size in known]
