"""Freeze: leading layers, or parameters by pattern, are not trained, `freeze{cut=8}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memir.ir.core import Program
from memir.ir.unroll import has_repeats, unroll
from memir.rewrite.cut import frozen_prefix
from memir.rewrite.prune import without_gradients


@dataclass(frozen=True, slots=True)
class Freeze:
    name: ClassVar[str] = "freeze"
    cut: int = 0
    embeddings: bool = True
    head: bool = False

    def run(self, program: Program) -> Program:
        """The program in which the first `cut` layers are not trained."""
        if has_repeats(program):
            program = unroll(program)
        frozen, no_grad = frozen_prefix(program, self.cut, embeddings=self.embeddings, head=self.head)
        return without_gradients(program, frozen, no_grad)[0]
