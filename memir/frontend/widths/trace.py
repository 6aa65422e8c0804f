"""The step over B, S, L and the widths: few layers traced at the target's widths and at others, generalized, folded.

The layers that are compared for repeating, and every lifetime, are those of the target at its own widths, as without symbols
for widths (`memir.frontend.folding`); each of their sizes must be that of the generalized few layers where the widths have the
target's values. At last the few layers are traced once more at random widths, B and S, and must be the program to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.frontend.attempts import Attempts
from memir.frontend.beside import Beside
from memir.frontend.depth import cut, find_layout
from memir.frontend.fake import Extent
from memir.frontend.families import FoldError
from memir.frontend.fold import DEPTH
from memir.frontend.folding import Folding
from memir.frontend.layout import Layout
from memir.frontend.loaded import LoadedModel
from memir.frontend.microbatches import TRACED, collapsed
from memir.frontend.trace import trace_once
from memir.frontend.widths.align import generalized, same_structure
from memir.frontend.widths.coefficients import Coefficients, NotGeneralError
from memir.frontend.widths.fields import Widths, find_widths, fresh, points
from memir.ir.core import Kind, Program
from memir.ir.declarations import member_count
from memir.ir.domain import Condition
from memir.ir.size import Size
from memir.recipe import Recipe

if TYPE_CHECKING:
    from memir.frontend.trace import Traced

FEWEST, MOST = 2, 4  # points beside the target that are traced
_NO_OPTION = re.compile(r"--set (\w+): .* has no such option")
REFUSED = 5  # random points that a configuration may refuse
LoadAt = Callable[[Mapping[str, str], Recipe], LoadedModel]
Progress = Callable[[str], None]
Trace = Callable[[LoadAt, Recipe], Program]


@dataclass(frozen=True, slots=True)
class Wide:
    """A step over B, S and the atoms of its widths, and over the depth L where its layers repeat."""

    program: Program
    widths: Widths  # of the atoms that are symbols in the program
    env: dict[str, int]  # the target's value of every dim
    num_parameters: int
    num_trainable: int
    numbers: tuple[str, ...]  # widths that stayed numbers, each with the reason
    assumptions: tuple[str, ...]
    traced_at: tuple[dict[str, int], ...]  # the points of the atoms beside the target's own
    verified_at: tuple[dict[str, int], ...]  # the random points, B and S among them


def trace_wide(
    load_at: LoadAt,
    loaded: LoadedModel,
    recipe: Recipe,
    batch: int,
    seq: int,
    seed: int,
    progress: Progress,
    keep: Collection[str] | None = None,
) -> Wide:
    """See the module. `load_at` loads the model with further `--set` options and another recipe; `loaded` is the first it gave.

    B and S are where it is traced, at least 2; `keep` are the symbols of widths that do not become numbers, None is all.
    InconclusiveError where the step cannot be followed, or where the fresh trace is another program.
    """
    if recipe.accumulate > TRACED:
        wide = trace_wide(load_at, loaded, replace(recipe, accumulate=TRACED), batch, seq, seed, progress, keep)
        program = collapsed(wide.program, recipe.accumulate)
        if program is not None:
            return replace(wide, program=program)
        loaded = load_at({}, recipe)
    widths = find_widths(loaded.config, recipe).of(keep)
    if loaded.max_seq is not None and loaded.max_seq == widths.target.get("P"):
        widths = replace(widths, limits=("S <= P",))
    problem: FoldError | None = None
    for peel, few in ((1, 1), (1, 2), (2, 2)):
        layout = find_layout(loaded, 2 * peel + 2)
        if layout is None:
            break
        if few == 1 and recipe.lora is not None:
            continue
        try:
            return _Folded(load_at, recipe, batch, seq, seed, progress, layout, peel, few, widths).over_widths(loaded)
        except FoldError as error:
            problem, loaded = problem or error, load_at({}, recipe)
    wide = _Flat(load_at, recipe, batch, seq, seed, progress).over_widths(widths)
    if problem is not None:
        where = f" ({problem.where.splitlines()[0].strip()})" if problem.where else ""
        reason = f"all layers were traced, no formula in L: {problem.message}{where}"
        wide = replace(wide, assumptions=(*wide.assumptions, reason))
    return wide


class _Many:
    """Few layers, or all, at many widths."""

    def __init__(self, load_at: LoadAt, recipe: Recipe, point: dict[str, int], seed: int, progress: Progress) -> None:
        self.load_at, self.recipe, self.point, self.seed, self.progress = load_at, recipe, point, seed, progress
        self.layout: Layout | None = None  # None: all layers
        self.lifetimes = True

    def general(self, widths: Widths) -> tuple[Traced, Widths, tuple[str, ...], tuple[dict[str, int], ...]]:
        """The target's trace, with its program over the atoms; the atoms left, why others are numbers, where traced."""
        base = self._symbolic(widths, None)
        programs: dict[str, Program] = {}

        def at(widths: Widths, point: dict[str, int]) -> Program:
            key = repr(sorted(widths.sizes(point).items()))
            if key not in programs:
                shown = ", ".join(f"{name}={value}" for name, value in widths.sizes(point).items())
                self.progress(f"tracing at {shown}")
                programs[key] = self._symbolic(widths, point).program
                same_structure([base.program, programs[key]])
            return programs[key]

        reasons: list[str] = []
        while widths.atoms:
            try:
                program, traced_at = self._together(base.program, at, widths)
                return replace(base, program=program), widths, tuple(reasons), traced_at
            except MemirError as error:
                field = _refused(error)
                if field in dict(widths.fields):
                    symbol = dict(widths.fields)[field]
                    value = widths.sizes(widths.target)[symbol]
                    why = f"{field} is no option of the model, so it is a number or follows the others"
                    reasons.append(f"{symbol} = {value}: {why}")
                    widths = widths.unset(field)
                else:
                    widths = self._apart(at, base.program, widths, reasons, error)
        return base, widths, tuple(reasons), ()

    def _together(
        self, base: Program, at: Callable[[Widths, dict[str, int]], Program], widths: Widths
    ) -> tuple[Program, tuple[dict[str, int], ...]]:
        chosen = points(widths, MOST)
        traced = [base]
        error: NotGeneralError | None = None
        for number, point in enumerate(chosen):
            traced.append(at(widths, point))
            if number + 1 < FEWEST:
                continue
            found = Coefficients(widths.factors(), [widths.target, *chosen[: number + 1]])
            if not found.is_unique():
                continue
            try:
                program = generalized(traced, found, ("B", "S", *(a.name for a in widths.atoms)))
                domain = dict.fromkeys((*program.domain, *widths.domain()))
                return replace(program, domain=tuple(domain)), tuple(chosen[: number + 1])
            except NotGeneralError as caught:
                error = caught
        raise error or NotGeneralError("the widths that the code takes do not tell products of widths apart")

    def _apart(
        self,
        at: Callable[[Widths, dict[str, int]], Program],
        base: Program,
        widths: Widths,
        reasons: list[str],
        error: MemirError,
    ) -> Widths:
        """The widths without the first atom that does not generalize, varied one after another."""
        names = sorted(
            (atom.name for atom in widths.atoms), key=lambda name: name != "h"
        )  # heads divide it: it moves with them
        for number in range(1, len(names) + 1):
            some = widths.without(frozenset(names[number:]))
            try:
                self._together(base, at, some)
            except MemirError as caught:
                self._number(names[number - 1], widths, reasons, caught)
                return widths.without(frozenset({names[number - 1]}))
        self._number(names[-1], widths, reasons, error)
        return widths.without(frozenset({names[-1]}))

    def _number(self, name: str, widths: Widths, reasons: list[str], error: MemirError) -> None:
        where = f" ({error.where.splitlines()[0].strip()})" if error.where else ""
        value = widths.target[name]
        shown = {"g": "a/k"}.get(name, name)
        reasons.append(f"{shown} = {value}: {error.message}{where}")

    def _load(self, widths: Widths, point: Mapping[str, int] | None) -> tuple[Callable[[], LoadedModel], Recipe]:
        recipe = self.recipe if point is None else widths.recipe(self.recipe, point)
        sets = {} if point is None else widths.sets(point)

        def load() -> LoadedModel:
            loaded = self.load_at(sets, recipe)
            return loaded if self.layout is None else cut(loaded, self.layout)

        return load, recipe

    def _symbolic(self, widths: Widths, point: Mapping[str, int] | None) -> Traced:
        load, recipe = self._load(widths, point)

        def once(*arguments: Any) -> Any:
            return trace_once(*arguments, lifetimes=self.lifetimes)

        attempts = Attempts(once, load, recipe, self.point["B"], self.point["S"], self.progress)
        try:
            traced = attempts.run_unpinned()
        except UsageError as error:
            if point is None and self.layout is not None:
                raise FoldError(f"{self.layout.depth} layers alone do not run: {error.message}", where=error.where) from error
            raise
        if traced.inconclusive:
            raise InconclusiveError(traced.inconclusive[0])
        return traced

    def verify(self, program: Program, widths: Widths) -> dict[str, int]:
        """The random point at which a fresh trace is the program to the byte. InconclusiveError where it is another."""
        problem: MemirError | None = None
        for attempt in range(REFUSED):
            env = self._random(program, widths, attempt)
            shown = ", ".join(f"{name}={value}" for name, value in env.items())
            self.progress(f"verifying at {shown}")
            load, recipe = self._load(widths, env)
            batch, seq = (Extent(name, env[name], False) for name in ("B", "S"))
            try:
                traced, _ = trace_once(load, recipe, batch, seq, lifetimes=self.lifetimes)
            except UsageError as error:  # a configuration may refuse what nothing here knows of
                problem = error
                continue
            difference = _difference(program, traced.program, env)
            if not difference:
                return env
            raise InconclusiveError(
                f"the formula does not hold at other widths: {difference}",
                where=f"traced anew at {shown}",
                hint="keep fewer symbols, without the width that it is about:  --symbols B,S,L,h,f",
            )
        message = problem.message if problem is not None else ""
        raise InconclusiveError(f"the formula cannot be verified: the model refuses the widths that were tried: {message}")

    def _random(self, program: Program, widths: Widths, attempt: int) -> dict[str, int]:
        """A random point of the domain; with the asked S where no other one is found."""
        random = Random(100 * self.seed + attempt)
        conditions = [c for c in map(Condition.read, program.domain) if c is not None]
        asked = self.point["S"]
        for number in range(40):
            point = fresh(widths, 100 * (self.seed + attempt) + number)
            seq = random.randrange(max(2, asked // 4), asked + 1) if number < 20 else asked
            env = {**point, "B": random.randrange(2, 9), "S": seq}
            if all(c.holds(env) is not False for c in conditions):
                return env
        raise InconclusiveError(
            "the formula cannot be verified: no random point lies in its domain", where=", ".join(program.domain)
        )


def _refused(error: MemirError) -> str:
    """The field that cannot be set, as a factory's result has fields that are none of its arguments; else empty."""
    match = _NO_OPTION.match(error.message) if isinstance(error, UsageError) else None
    return match.group(1) if match else ""


def _difference(program: Program, fresh: Program, env: Mapping[str, int]) -> str:
    """What is not alike between a program at a point and one that was traced there; empty where they are the same."""
    try:
        same_structure([program, replace(fresh, dims=program.dims)])
    except NotGeneralError as error:
        return error.message + (f" ({error.where})" if error.where else "")

    def numbers(sizes: Sequence[Size]) -> list[int]:
        return [size.evaluate(env) for size in sizes]

    for a, b in zip(program.storages, fresh.storages, strict=True):
        if numbers([a.nbytes]) != numbers([b.nbytes]):
            return f"${a.name} has {b.nbytes} bytes, and the formula {a.nbytes} gives {a.nbytes.evaluate(env)}"
    pairs = zip(program.ops(), fresh.ops(), strict=True)
    for (_, op), (_, other) in pairs:
        if numbers([op.scratch]) != numbers([other.scratch]):
            return f"the workspace of {op.opcode} is {other.scratch}, not {op.scratch}"
        for value, like in zip(op.results, other.results, strict=True):
            if numbers(value.shape) != numbers(like.shape):
                return f"%{value.name} has another shape"
    return ""


class _Folded(Folding):
    """The folded step. `over_widths` is the one entry."""

    def __init__(
        self,
        load_at: LoadAt,
        recipe: Recipe,
        batch: int,
        seq: int,
        seed: int,
        progress: Progress,
        layout: Layout,
        peel: int,
        few: int,
        widths: Widths,
    ) -> None:
        super().__init__(trace_once, lambda: load_at({}, recipe), recipe, batch, seq, progress, layout, peel, few)
        self.widths = widths
        self.many = _Many(load_at, recipe, {"B": batch, "S": seq}, seed, progress)
        self.many.layout, self.many.lifetimes = self.few, False

    def over_widths(self, loaded: LoadedModel) -> Wide:
        """The step; `loaded` is the whole model, which may be changed. FoldError where the layers do not repeat."""
        num_parameters, num_trainable, nbytes = self._whole(loaded)
        with Beside([lambda: self._concrete(self.enough, self.asked)], fork=loaded.is_library) as beside:
            traced, widths, numbers, traced_at = self.many.general(self.widths)
            verified = self.many.verify(traced.program, widths)
            concrete = beside.result(0)
        env = {**self.asked, **widths.target, DEPTH: self.layout.depth}
        program = self._folded(concrete, [(traced.program, self.few)], {**self.asked, **widths.target})
        if parameter_bytes(program, env) != nbytes:
            raise FoldError("the parameters of the whole model are not those of its repeated layers")
        assumptions = tuple(traced.assumptions)
        return Wide(program, widths, env, num_parameters, num_trainable, numbers, assumptions, traced_at, (verified,))


class _Flat:
    """All layers, where they do not repeat or are too few to be folded."""

    def __init__(self, load_at: LoadAt, recipe: Recipe, batch: int, seq: int, seed: int, progress: Progress) -> None:
        self.many = _Many(load_at, recipe, {"B": batch, "S": seq}, seed, progress)

    def over_widths(self, widths: Widths) -> Wide:
        """The step."""
        traced, widths, numbers, traced_at = self.many.general(widths)
        verified = self.many.verify(traced.program, widths)
        env = {**self.many.point, **widths.target}
        counts = traced.num_parameters, traced.num_trainable
        return Wide(traced.program, widths, env, *counts, numbers, tuple(traced.assumptions), traced_at, (verified,))


def parameter_bytes(program: Program, env: Mapping[str, int]) -> int:
    """The bytes of all parameters at a point."""
    return sum(
        (storage.nbytes * member_count(storage.name)).evaluate(env)
        for storage in program.storages
        if storage.kind == Kind.PARAMETER
    )
