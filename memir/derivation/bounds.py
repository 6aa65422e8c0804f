"""For which cuts a program is: from one to another, both counted from the first layer or from the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memir.ir.core import Program
from memir.ir.domain import Condition
from memir.ir.size import Size

CUT = "c"  # frozen leading layers; k are key-value heads in a formula
DEPTH = "L"
TRAINED = f"({DEPTH}-{CUT})"  # layers that are trained: a symbol of what is shown


@dataclass(frozen=True, slots=True)
class Cuts:
    """low <= c <= high; in layers that repeat as a group of several, those with c % group == place."""

    low: Size  # a number, or L less a number
    high: Size
    group: int = 1
    place: int = 0

    def holds(self, cut: int, depth: int) -> bool:
        """Whether a cut is among them."""
        low, high = (size.evaluate({DEPTH: depth}) for size in (self.low, self.high))
        return low <= cut <= high and cut % self.group == self.place % self.group

    def conditions(self) -> tuple[str, ...]:
        """The same as conditions of a domain; none for a single cut, of which no size has the symbol."""
        if self.low is self.high:
            return ()
        left = Size.of(DEPTH) - self.high
        upper = f"{CUT} <= {self.high}" if left.is_constant and not left.constant else f"{DEPTH} >= {left + Size.of(CUT)}"
        grouped = (f"{CUT} % {self.group} == {self.place}",) if self.group > 1 else ()
        return (f"{CUT} >= {self.low}", upper, *grouped)

    def words(self) -> str:
        """`c = 0`, `1 <= c <= L - 3`, `c = L`."""
        grouped = f" and c % {self.group} = {self.place}" if self.group > 1 else ""
        return f"{CUT} = {self.low}" if self.low is self.high else f"{self.low} <= {CUT} <= {self.high}{grouped}"

    def code(self) -> str:
        """The same for Python, as a condition."""
        grouped = f" and {CUT} % {self.group} == {self.place}" if self.group > 1 else ""
        return f"{CUT} == {self.low}" if self.low is self.high else f"{self.low} <= {CUT} <= {self.high}{grouped}"

    def within(self, program: Program) -> Program:
        """The program with these as its conditions on the cut; a single cut is no dim of it."""
        if self.low is self.high:
            program = replace(program, dims=tuple(name for name in program.dims if name != CUT))
        return replace(program, domain=tuple(dict.fromkeys((*without_cut(program.domain), *self.conditions()))))


def by_layers(size: Size) -> Size:
    """The size over all layers and the trained ones: 30*L - 24*c is 6*L + 24*(L-c)."""
    symbols = size.symbols()
    return size.substitute({CUT: Size.of(DEPTH) - Size.of(TRAINED)}) if CUT in symbols and DEPTH in symbols else size


def without_cut(domain: Sequence[str]) -> list[str]:
    """The conditions that say nothing about the cut."""
    return [text for text in domain if (c := Condition.read(text)) is None or CUT not in c.symbols()]
