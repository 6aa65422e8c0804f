"""A step whose cost does not depend on the depth: a few layers are traced, what repeats becomes a Repeat over L.

What is traced: with numbers, at the asked B and S, the first and the last unit of layers and two between them, which are
compared (`memir.frontend.fold`); with symbols, as few layers as there are kinds (`memir.frontend.symbolize`). Where a size that
does not depend on B and S grows with the depth (the norms that clipping stacks), deeper steps are traced too and the size is
fitted. Where the layers do not repeat, FoldError says why, and all of them are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memir.errors import InconclusiveError, UsageError
from memir.frontend.attempts import Attempts, TraceOnce
from memir.frontend.beside import Beside
from memir.frontend.depth import cut, find_layout
from memir.frontend.fake import Extent
from memir.frontend.families import FoldError
from memir.frontend.fold import DEPTH, fold
from memir.frontend.layout import Layout
from memir.frontend.loaded import LoadedModel
from memir.frontend.prepare import prepare
from memir.frontend.quantize import num_elements
from memir.frontend.symbolize import symbolize
from memir.frontend.with_depth import merged
from memir.ir.core import Kind, Program
from memir.ir.declarations import member_count
from memir.ir.domain import widened
from memir.recipe import Recipe

if TYPE_CHECKING:
    from memir.frontend.trace import Traced

Progress = Callable[[str], None]
Load = Callable[[], LoadedModel]


def is_deep(loaded: LoadedModel) -> bool:
    """Whether there are more layers than folding would trace."""
    return find_layout(loaded, 4) is not None


def trace_folded(once: TraceOnce, load: Load, recipe: Recipe, batch: int, seq: int, progress: Progress) -> Traced | None:
    """The folded step; None where there are too few layers for that. FoldError where they do not repeat."""
    loaded: LoadedModel | None = load()
    problem: FoldError | None = None
    for peel, few in ((1, 1), (1, 2), (2, 2)):
        loaded = loaded or load()
        layout = find_layout(loaded, 2 * peel + 2)
        if layout is None:
            break
        if few == 1 and recipe.lora is not None:  # the first layer's input needs no gradient: it stands for no other
            continue
        try:
            return Folding(once, load, recipe, batch, seq, progress, layout, peel, few).run(loaded)
        except FoldError as error:
            problem, loaded = problem or error, None  # its parameters were counted, which may have changed it
    if problem is not None:
        raise problem
    return None


class Folding:
    """The folded step of one layout: how many layers are traced with numbers (`enough`) and with symbols (`few`)."""

    def __init__(
        self,
        once: TraceOnce,
        load: Load,
        recipe: Recipe,
        batch: int,
        seq: int,
        progress: Progress,
        layout: Layout,
        peel: int,
        few: int,
    ) -> None:
        self.once, self.load, self.recipe, self.progress = once, load, recipe, progress
        self.asked = {"B": batch, "S": seq}
        self.layout, self.peel = layout, peel
        self.enough = layout.at(2 * peel + 2)
        self.few = layout.at(few)

    def run(self, loaded: LoadedModel) -> Traced:
        """See `trace_folded`. `loaded` is the whole model, which may be changed."""
        counts = self._whole(loaded)
        library = loaded.is_library  # the user's code runs in this process only
        tasks = [lambda: self._concrete(self.enough, self.asked)]
        if self.asked["B"] == 1:  # other operators run there, as a rule, than where the symbols stand for more
            tasks.append(lambda: self._structure({**self.asked, "B": 2}))
        with Beside(tasks, fork=library) as beside:
            return self._traced(beside, *counts)

    def _traced(self, beside: Beside[Program], num_parameters: int, num_trainable: int, nbytes: int) -> Traced:
        attempts = self._attempts(self.few)
        try:
            traced = attempts.run_unpinned()
        except UsageError as error:
            raise FoldError(f"{self.few.depth} layers alone do not run: {error.message}", where=error.where) from error
        concrete = beside.result(0)
        general = None
        if not attempts.outside:
            program = self._folded(concrete, [(traced.program, self.few)], self.asked)
        else:
            try:
                program = self._folded(concrete, [(traced.program, self.few)], self.asked)
                domain = tuple(filter(None, (widened(text, self.asked) for text in program.domain)))
                program = replace(program, domain=domain)
            except FoldError:
                point = attempts.traced_at
                ahead = point == {**self.asked, "B": 2} and self.asked["B"] == 1
                pinned = self._pinned_header(attempts.outside)
                structure = beside.result(1) if ahead else self._structure(point)
                general = self._folded(structure, [(traced.program, self.few)], point)
                program = self._folded(
                    concrete, [(traced.program, self.few), (pinned, self.layout.at(1))], self.asked, attempts.outside
                )
        for one in (program, general):
            if one is not None and _parameter_bytes(one, self.layout.depth) != nbytes:
                raise FoldError("the parameters of the whole model are not those of its repeated layers")
        return replace(
            traced,
            program=program,
            general=general,
            num_parameters=num_parameters,
            num_trainable=num_trainable,
            dims={DEPTH: self.layout.depth},
        )

    def _attempts(self, layout: Layout) -> Attempts:
        """Symbolic traces of so many layers; lifetimes are read off the concrete ones."""

        def once(*arguments: Any) -> Any:
            return self.once(*arguments, lifetimes=False)

        return Attempts(once, lambda: cut(self.load(), layout), self.recipe, self.asked["B"], self.asked["S"], self.progress)

    def _structure(self, point: dict[str, int]) -> Program:
        """Enough layers at another point, for a formula, which needs no drops."""
        return self._concrete(self.enough, point, lifetimes=False)

    def _pinned_header(self, values: dict[str, int]) -> Program:
        """One layer at the asked point, where other operators run than the general program has: what they share has the general
        one's sizes, the rest those of this trace, with these symbols as numbers."""
        point = ", ".join(f"{name}={value}" for name, value in values.items())
        self.progress(f"tracing again at {point}: other operators run there")
        exact = self._attempts(self.layout.at(1)).at(values)
        pinned = tuple(f"{name} == {value}" for name, value in values.items())
        others = tuple(c for c in exact.program.domain if c.split(" ")[0] not in values)
        return replace(exact.program, domain=pinned + others)

    def _whole(self, loaded: LoadedModel) -> tuple[int, int, int]:
        """Parameters, trainable ones and their bytes of the whole model."""
        module = prepare(loaded, self.recipe)
        return *num_elements(module), sum(p.numel() * p.element_size() for p in module.parameters())

    def _concrete(self, layout: Layout, point: dict[str, int], *, lifetimes: bool = True) -> Program:
        self.progress(f"tracing {layout.depth} of {self.layout.depth} layers")
        batch, seq = (Extent(name, point[name], False) for name in ("B", "S"))
        try:
            traced, _ = self.once(
                lambda: cut(self.load(), layout), self.recipe, batch, seq, lambda _: None, lifetimes=lifetimes
            )
        except (InconclusiveError, UsageError) as error:  # on all layers it is said better, or does not happen
            raise FoldError(f"{layout.depth} layers alone do not run: {error.message}", where=error.where) from error
        return traced.program

    def _folded(
        self,
        concrete: Program,
        symbolic: Sequence[tuple[Program, Layout]],
        point: dict[str, int],
        fixed: Mapping[str, int] | None = None,
    ) -> Program:
        program, deep = symbolize(concrete, self.enough, symbolic, point, fixed)
        folded = fold(program, self.enough, self.peel)
        if not deep:
            return folded
        others = []
        if self.enough.units + 2 > self.layout.units:
            raise FoldError(f"a size grows with the layers, and {self.layout.depth} are too few to see how")
        for more in (1, 2):
            layout = self.enough.at(self.enough.units + more)
            deeper, _ = symbolize(self._concrete(layout, point), layout, symbolic, point, fixed)
            others.append(fold(deeper, layout, self.peel))
        return merged([folded, *others], self.enough, DEPTH)


def _parameter_bytes(program: Program, depth: int) -> int:
    total = 0
    for storage in program.storages:
        if storage.kind == Kind.PARAMETER:
            total += (storage.nbytes * member_count(storage.name)).evaluate({DEPTH: depth})
    return total
