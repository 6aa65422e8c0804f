"""The programs of all cuts: one over the depth and the cut for the middle, one over the depth for each cut near an end.

Layers that repeat in groups have as many programs for the middle as a group has layers. A model of few layers is rewritten
whole where that is less than the samples that a lift needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from memir.errors import InconclusiveError
from memir.ir.core import Program
from memir.ir.domain import Condition
from memir.ir.unroll import has_repeats
from memir.rewrite.cut import frozen_prefix
from memir.rewrite.depths import CUT, at_end, at_start, depth_symbol, lifted, over_cuts, stride
from memir.rewrite.flow import Flow
from memir.rewrite.lift import Rewrite, Unrolls
from memir.rewrite.prune import without_gradients

Env = Mapping[str, int]


def programs(
    program: Program, env: Env, cuts: range, *, depth: int, embeddings: bool, head: bool
) -> Iterator[tuple[Sequence[int], Program]]:
    """(cuts, the program for them) of the step with `depth` layers."""
    freezing = _Freezing(program, env, depth, embeddings, head)
    done = set()
    if 0 in cuts:
        yield (0,), freezing.uncut() if head else program
        done.add(0)
    for place in range(freezing.group):
        middle, general = freezing.middle([k for k in cuts if k and k % freezing.group == place], place)
        if general is not None:
            yield middle, general
            done |= set(middle)
    for cut in cuts:
        if cut not in done:
            yield (cut,), freezing.at(cut)


class _Freezing:
    """One step's cuts. What they share is made once: the program at each number of layers, and its data flow."""

    def __init__(self, program: Program, env: Env, depth: int, embeddings: bool, head: bool) -> None:
        self.program, self.env, self.depth = program, env, depth
        self.embeddings, self.head = embeddings, head
        self.folded = has_repeats(program)
        self.group = stride(program) if self.folded else 1
        self.unrolls = Unrolls(program)
        self._flows: dict[int, Flow] = {}  # by the identity of a program that `unrolls` holds

    def uncut(self) -> Program:
        """The step in which only the head is frozen."""
        return self._at(0, lambda: lifted(self.program, self._rewrite(0), 5 * self.group, self.unrolls))

    def middle(self, cuts: Sequence[int], place: int) -> tuple[Sequence[int], Program | None]:
        """Those of the cuts that one program over the cut holds for, and that; none if the layers differ."""
        if not (self.folded and cuts):
            return (), None
        try:
            general = over_cuts(self.program, self._rewrite(0), place=place, unrolls=self.unrolls)
        except InconclusiveError:
            return (), None  # each cut is rewritten by itself
        return [k for k in cuts if self._holds(general, {**self.env, CUT: k})], general

    def at(self, cut: int) -> Program:
        """The step at one cut."""
        left = self.depth - cut
        if cut <= left:
            return self._at(cut, lambda: at_start(self.program, self._rewrite(cut), cut, self.unrolls))
        return self._at(cut, lambda: at_end(self.program, self._rewrite(cut), left, self.unrolls))

    def _at(self, cut: int, make: Callable[[], Program]) -> Program:
        """The lifted program where there are Repeats and it holds for the step; else the flat one with all layers."""
        if self.folded:
            try:
                found = make()
                if self._holds(found, self.env):
                    return found
            except InconclusiveError:
                pass  # the layers differ too much to be told by a few
        known = {depth_symbol(self.program): self.depth} if self.folded else {}
        return self._rewrite(cut)(self.unrolls.at(known).program, {})[0]

    def _rewrite(self, cut: int) -> Rewrite:
        def rewrite(flat: Program, symbols: Env) -> tuple[Program, list[int]]:
            flow = self._flows.get(id(flat))
            if flow is None:
                flow = self._flows[id(flat)] = Flow(flat)
            frozen, no_grad = frozen_prefix(flow, symbols.get(CUT, cut), embeddings=self.embeddings, head=self.head)
            return without_gradients(flow, frozen, no_grad)

        return rewrite

    def _holds(self, program: Program, env: Env) -> bool:
        conditions = [c for text in program.domain if (c := Condition.read(text)) is not None]
        return all(c.holds({s: env[s] for s in c.symbols()}) is not False for c in conditions if c.symbols() <= env.keys())
