"""The programs of all cuts: one over the depth and the cut for the middle, one over the depth for each cut near an end.

Layers that repeat in groups have as many programs for the middle as a group has layers. A model of few layers is rewritten
whole where that is less than the samples that a lift needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from memir.errors import InconclusiveError
from memir.ir.core import Program
from memir.ir.domain import broken
from memir.ir.unroll import has_repeats
from memir.rewrite.cut import Prefix
from memir.rewrite.depths import CUT, depth_symbol, depths, depths_and_cuts, from_end, from_start, stride
from memir.rewrite.flow import Flow
from memir.rewrite.lift import Lifted, Rewrite, Shared, Span, lift
from memir.rewrite.prune import without_gradients

Env = Mapping[str, int]


def programs(
    program: Program, env: Env, cuts: range, *, depth: int, embeddings: bool, head: bool, symbol: str = CUT
) -> Iterator[tuple[Sequence[int], Lifted]]:
    """(cuts, the program for them) of the step with `depth` layers; in that of several cuts `symbol` is the cut."""
    freezing = _Freezing(program, env, depth, embeddings, head, symbol)
    done = set()
    if 0 in cuts:
        yield (0,), freezing.uncut() if head else Lifted(program)
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

    def __init__(self, program: Program, env: Env, depth: int, embeddings: bool, head: bool, symbol: str) -> None:
        self.program, self.env, self.depth = program, env, depth
        self.embeddings, self.head, self.symbol = embeddings, head, symbol
        self.folded = has_repeats(program)
        self.group = stride(program) if self.folded else 1
        self.shared = Shared(program)
        self._prefixes: dict[int, Prefix] = {}  # by the identity of a program that is held in `shared`

    def uncut(self) -> Lifted:
        """The step in which only the head is frozen."""
        return self._at(0, lambda: depths(self.program, 5 * self.group))

    def middle(self, cuts: Sequence[int], place: int) -> tuple[Sequence[int], Lifted | None]:
        """Those of the cuts that one program over the cut holds for, and that; none if the layers differ."""
        if not (self.folded and cuts):
            return (), None
        try:
            general = lift(self.program, self._rewrite(0), depths_and_cuts(self.program, place, self.symbol), self.shared)
        except InconclusiveError:
            return (), None  # each cut is rewritten by itself
        return [k for k in cuts if self._holds(general.program, {**self.env, self.symbol: k})], general

    def at(self, cut: int) -> Lifted:
        """The step at one cut."""
        left = self.depth - cut
        if cut <= left:
            return self._at(cut, lambda: from_start(self.program, cut))
        return self._at(cut, lambda: from_end(self.program, left, self.symbol))

    def _at(self, cut: int, span: Callable[[], Span]) -> Lifted:
        """The lifted program where there are Repeats and it holds for the step; else the flat one with all layers."""
        if self.folded:
            try:
                found = lift(self.program, self._rewrite(cut), span(), self.shared)
                if self._holds(found.program, self.env):
                    return found
            except InconclusiveError:
                pass  # the layers differ too much to be told by a few
        known = {depth_symbol(self.program): self.depth} if self.folded else {}
        return Lifted(self._rewrite(cut)(self.shared.unrolls.at(known).program, {})[0])

    def _rewrite(self, cut: int) -> Rewrite:
        def rewrite(flat: Program, symbols: Env) -> tuple[Program, list[int]]:
            prefix = self._prefixes.get(id(flat))
            if prefix is None:
                prefix = self._prefixes[id(flat)] = Prefix(Flow(flat))
            frozen, no_grad = prefix.frozen(symbols.get(self.symbol, cut), embeddings=self.embeddings, head=self.head)
            return without_gradients(prefix.flow, frozen, no_grad)

        return rewrite

    def _holds(self, program: Program, env: Env) -> bool:
        return broken(program.domain, env) is None
