"""Bind: symbols become numbers, `bind{B=4 S=2048}`; Repeats and families stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memir.ir.core import Program
from memir.ir.unroll import bind


@dataclass(frozen=True, slots=True)
class Bind:
    """`symbols` are the options, by the names of the program's symbols."""

    name: ClassVar[str] = "bind"
    symbols: tuple[tuple[str, int], ...] = ()

    def run(self, program: Program) -> Program:
        """The program at these values. UsageError for an unknown symbol, and for a value outside the domain."""
        return bind(program, dict(self.symbols)) if self.symbols else program
