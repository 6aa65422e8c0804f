"""How a step is traced: with B and S as symbols; apart where a size is 1; from several concrete traces where a symbol is
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.frontend.domains import broken_at
from memir.frontend.fake import Extent, Fake
from memir.frontend.fit import fit_programs, loops_with_length
from memir.frontend.loaded import LoadedModel
from memir.frontend.symbols import LostSymbolError, specialization_site, specialized
from memir.ir.core import Program
from memir.ir.domain import widened
from memir.recipe import Recipe

if TYPE_CHECKING:
    from memir.frontend.trace import Traced

Progress = Callable[[str], None]
TraceOnce = Callable[..., "tuple[Traced, Fake]"]  # memir.frontend.trace.trace_once


class Attempts:
    """All ways to trace one step at B=batch, S=seq, from the best down."""

    def __init__(
        self, once: TraceOnce, load: Callable[[], LoadedModel], recipe: Recipe, batch: int, seq: int, progress: Progress
    ) -> None:
        self.once, self.load, self.recipe, self.progress = once, load, recipe, progress
        self.batch, self.seq = batch, seq

    def run(self) -> Traced:
        """The traced step; its program's domain holds at the asked point."""
        traced = self.run_unpinned()
        return self.pinned(traced) if self.outside else traced

    def run_unpinned(self) -> Traced:
        """The same, but where `outside` is not empty the domain may not hold there yet: `pinned` looks."""
        try:
            traced, lost = self._symbolic(max(self.batch, 2), max(self.seq, 2))
            if lost:  # a coincidence, such as S equal to the model's width, or really code that fixes a size
                step = 64 if self.seq % 64 == 0 else 1  # down, for a table's length is often the model's limit
                other_s = self.seq - step if self.seq >= 4 * step else self.seq + step
                again, lost_again = self._retry(max(self.batch, 2) + 1, other_s)
                if again is not None and not lost_again:
                    traced, lost = again, {}
                else:
                    lost = lost_again or lost
        except InconclusiveError as error:
            return self._fitted({"B": self.batch, "S": self.seq}, error.message, error)
        if traced is None or lost:
            return self._fitted(lost, self.site, None)
        return traced

    site = ""  # the line that fixed a symbol
    outside: dict[str, int] = {}  # symbols in guards that do not hold at the asked point: name -> asked value
    traced_at: dict[str, int] = {}  # where the last symbolic trace was made

    def at(self, values: dict[str, int]) -> Traced:
        """The step with these symbols as numbers and the others as symbols."""
        return self._concrete(values, frozenset({"B", "S"} - values.keys()))

    def _symbolic(self, batch: int, seq: int) -> tuple[Traced | None, dict[str, int]]:
        try:
            traced, fake = self.once(self.load, self.recipe, Extent("B", batch, True), Extent("S", seq, True), self.progress)
        except LostSymbolError as error:
            self.site = specialization_site(error.fake)
            return None, specialized(error.fake)
        lost = specialized(fake)
        if lost:
            self.site = specialization_site(fake)
        else:
            asked = {"B": self.batch, "S": self.seq}
            self.traced_at = {"B": batch, "S": seq}
            self.outside = {name: asked[name] for name in sorted(broken_at(fake, asked))}
        return traced, lost

    def _retry(self, batch: int, seq: int) -> tuple[Traced | None, dict[str, int]]:
        try:
            return self._symbolic(batch, seq)
        except InconclusiveError:
            return None, {}
        except Exception as error:  # e.g. beyond the model's limit: the user did not ask for this point
            if error.__class__.__name__ != "UsageError":
                raise
            return None, {}

    def _concrete(self, values: dict[str, int], symbols: frozenset[str]) -> Traced:
        extents = [
            Extent(name, values.get(name, max(asked, 2)), name in symbols)
            for name, asked in (("B", self.batch), ("S", self.seq))
        ]
        traced, fake = self.once(self.load, self.recipe, extents[0], extents[1], self.progress)
        if specialized(fake):
            raise InconclusiveError("a symbol that was kept before is lost now", where=specialization_site(fake))
        return traced

    def pinned(self, traced: Traced) -> Traced:
        """The asked point lies outside the domain (PyTorch takes a size of 1 apart; S may equal a table's length): traced with
        those sizes as numbers. If the program is the same there, the domain is widened; if not, the exact one is the answer and
        the general one is kept beside it.
        """
        values = self.outside
        point = ", ".join(f"{name}={value}" for name, value in values.items())
        self.progress(f"tracing again at {point}: other operators might run there")
        exact = self.at(values)
        if same_at(traced.program, exact.program, values):
            asked = {"B": self.batch, "S": self.seq}
            domain = tuple(filter(None, (widened(text, asked) for text in traced.program.domain)))
            return replace(traced, program=replace(traced.program, domain=domain))
        pinned = tuple(f"{name} == {value}" for name, value in values.items())
        others = tuple(c for c in exact.program.domain if c.split(" ")[0] not in values)
        return replace(exact, program=replace(exact.program, domain=pinned + others), general=traced.program)

    def _fitted(self, lost: dict[str, int], why: str, cause: InconclusiveError | None) -> Traced:
        """Concrete traces at several points of the lost symbols, and an exact polynomial through each size, verified.

        B=1 is a number of its own there too: PyTorch takes it apart.
        """
        self.progress(f"{', '.join(lost)} did not stay symbolic: tracing at several points")
        fixed = {"B": 1} if self.batch == 1 and (cause is not None or "B" not in lost) else {}

        def concrete(point: dict[str, int], symbols: frozenset[str]) -> Traced:
            return self._concrete({**point, **fixed}, symbols - fixed.keys())

        try:
            traced = self._looped(concrete, frozenset({"B"} - fixed.keys())) if "S" in lost else None
            how = "a loop over tokens, its middle collapsed; sizes fitted to traces at small S, verified at others"
            if traced is None:
                lost = {name: value for name, value in lost.items() if name not in fixed}
                traced = fit_programs(concrete, lost, frozenset({"B", "S"} - lost.keys()), self.batch, self.seq)
                how = "polynomials fitted to concrete traces and verified at others"
        except InconclusiveError as error:
            return self._at_the_point(why, cause or error)
        except MemirError as error:  # what the fit met, such as a file that cannot be imported again, is not the reason
            raise (cause or error) from error
        pinned = tuple(f"{name} == {value}" for name, value in fixed.items())
        domain = pinned + tuple(c for c in traced.program.domain if c.split(" ")[0] not in fixed)
        traced.assumptions.append(f"{' and '.join(sorted(lost))} did not stay symbolic ({why}): {how}")
        return replace(traced, program=replace(traced.program, domain=domain))

    def _at_the_point(self, why: str, error: InconclusiveError) -> Traced:
        """The step at the asked B and S as numbers, where no formula could be proven: the bytes hold there and nowhere else."""
        values = {"B": self.batch, "S": self.seq}
        self.progress("no formula holds: tracing the asked point alone")
        try:
            exact = self._concrete(values, frozenset())
        except MemirError:
            raise error from None
        exact.inconclusive.append(f"no formula in B and S: {error.message}" + (f" ({why})" if why != error.message else ""))
        pinned = tuple(f"{name} == {value}" for name, value in values.items())
        return replace(exact, program=replace(exact.program, domain=pinned))

    def _looped(self, concrete: Callable[[dict[str, int], frozenset[str]], Traced], kept: frozenset[str]) -> Traced | None:
        """The program of a loop over tokens, or None where there is none that small traces show."""
        try:
            return loops_with_length(concrete, kept)
        except UsageError:  # so short a sequence is not for this model
            return None


def same_at(symbolic: Program, exact: Program, env: dict[str, int]) -> bool:
    """Whether both programs run the same operators with the same bytes where `env` holds."""
    ours, theirs = [list(p.ops()) for p in (symbolic, exact)]
    if len(ours) != len(theirs):
        return False
    left = {s.name: s for s in symbolic.storages}
    right = {s.name: s for s in exact.storages}
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        if a.opcode != b.opcode or len(a.frees) != len(b.frees) or len(a.results) != len(b.results):
            return False
        sizes_a = [left[v.storage].nbytes.substitute(env) for v in a.results] + [a.scratch.substitute(env)]
        sizes_b = [right[v.storage].nbytes for v in b.results] + [b.scratch]
        if sizes_a != sizes_b:
            return False
        if sum((left[f].nbytes.substitute(env) for f in a.frees), start=a.scratch * 0) != sum(
            (right[f].nbytes for f in b.frees), start=b.scratch * 0
        ):
            return False
    return True


def trace_symbolically(
    once: TraceOnce, load: Callable[[], LoadedModel], recipe: Recipe, batch: int, seq: int, progress: Progress
) -> Traced:
    """See `memir.frontend.trace.trace`."""
    return Attempts(once, load, recipe, batch, seq, progress).run()
