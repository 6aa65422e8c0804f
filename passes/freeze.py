"""Freeze: leading layers, or parameters by pattern, are not trained, `freeze{cut=8}`.

A cut k freezes the embedding and the first k layers, which run under no_grad, as AutoFreeze runs them (arXiv 2102.01386,
section 3): nothing of them is saved for backward, their parameters have no gradients and no optimizer states. A pattern freezes
the parameters it matches wherever they are (requires_grad=False): activations above the lowest trained one stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.unroll import has_repeats, unroll
from memir.rewrite.cut import frozen_prefix, matching
from memir.rewrite.depths import FIRST_CUT, at_start, cut_symbol, over_cuts, stride
from memir.rewrite.flow import Flow
from memir.rewrite.prune import without_gradients


@dataclass(frozen=True, slots=True)
class Freeze:
    """`cut`: leading layers; `embeddings`, `head`: what runs before and after the layers; `pattern`: a regular expression."""

    name: ClassVar[str] = "freeze"
    cut: int = 0
    embeddings: bool = True  # with a cut of at least 1, what runs before the first layer is frozen too
    head: bool = False  # what runs after the last layer
    pattern: str = ""  # instead of a cut

    def run(self, program: Program) -> Program:
        """The program of the step in which the frozen part is not trained; unchanged for a cut of 0.

        Where the number of layers is a symbol, it stays one, and the domain says for which numbers the program holds. A small
        cut is rewritten as it is, one further in as a symbol like the depth.
        UsageError: a cut that the model has not, a pattern that matches nothing, both, or nothing left to train.
        InconclusiveError: an operator that cannot be followed, or layers that do not repeat.
        """
        if self.pattern and (self.cut or self.head):
            raise UsageError("freeze: give a cut or a pattern, not both", hint="freeze{cut=4}  or  freeze{pattern=norm}")
        if not (self.pattern or self.cut or self.head):
            return program
        if not has_repeats(program):
            return self._flat(program, self.cut)[0]
        flat = unroll(program)
        if not has_repeats(flat):
            return self._flat(flat, self.cut)[0]
        if self.pattern or self.cut < FIRST_CUT * stride(program):
            return at_start(program, lambda one, env: self._flat(one, self.cut), self.cut)
        symbol = cut_symbol(program)
        return over_cuts(program, lambda one, env: self._flat(one, env[symbol]), cut=self.cut, symbol=symbol)

    def _flat(self, program: Program, cut: int) -> tuple[Program, list[int]]:
        flow = Flow(program)
        if self.pattern:
            return without_gradients(flow, matching(flow, self.pattern))
        frozen, no_grad = frozen_prefix(flow, cut, embeddings=self.embeddings, head=self.head)
        return without_gradients(flow, frozen, no_grad)
