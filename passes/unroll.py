"""Unroll: every Repeat written out, `unroll`, or `unroll{L=4}` for a count that is a symbol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memir.ir.core import Program
from memir.ir.unroll import has_repeats, unroll


@dataclass(frozen=True, slots=True)
class Unroll:
    """`symbols` are bound to numbers first; a Repeat whose count is still a symbol stays."""

    name: ClassVar[str] = "unroll"
    symbols: tuple[tuple[str, int], ...] = ()

    def run(self, program: Program) -> Program:
        """The flat program. UsageError for an unknown symbol, a value outside the domain, or over 5 million operators."""
        return unroll(program, dict(self.symbols)) if self.symbols or has_repeats(program) else program
