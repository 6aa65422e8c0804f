"""Which layers repeat: `lead` layers, then units of `period` layers each, then `tail` layers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from memir.ir.size import Size, floor_div


@dataclass(frozen=True, slots=True)
class Layout:
    """The decoder layers of a model at some depth: `lead` + `period` * `units` + `tail` of them, in the list at `path`.

    The layers of one unit differ from each other (a local and a global one), the units do not.
    """

    path: str  # of the list, "model.layers"
    lead: int
    period: int
    units: int
    tail: int

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.lead + self.period * self.units + self.tail

    def at(self, units: int) -> Layout:
        """The same at another number of units."""
        return replace(self, units=units)

    def num_units(self, depth: str) -> Size:
        """The number of units over the symbol of the depth: `L`, `L-3`, `floor((L-4)/6)`."""
        rest = Size.of(depth) - self.lead - self.tail
        return rest if self.period == 1 else floor_div(rest, self.period)

    def domain(self, depth: str, least: int) -> tuple[str, ...]:
        """The conditions on the depth: at least `least` units, and whole ones."""
        conditions: tuple[str, ...] = (f"{depth} >= {self.at(least).depth}",)
        if self.period > 1:
            conditions += (f"{depth} % {self.period} == {(self.lead + self.tail) % self.period}",)
        return conditions

    def place(self, name: str) -> tuple[int, int] | None:
        """(unit, layer within the unit) of a module path or a storage's name; None outside of the units."""
        found = _pattern(self.path).search(name)
        if found is None:
            return None
        number = int(found.group(2)) - self.lead
        return divmod(number, self.period) if 0 <= number < self.period * self.units else None

    def layer(self, name: str) -> int | None:
        """The number of the layer that a module path or a storage's name belongs to."""
        found = _pattern(self.path).search(name)
        return None if found is None else int(found.group(2))

    def with_layer(self, name: str, text: str) -> str:
        """The name with `text` for the layer's number."""
        return _pattern(self.path).sub(lambda found: f"{found.group(1)}{text}", name, count=1)


@lru_cache(maxsize=64)
def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(rf"((?:^|(?<=\.)){re.escape(path)}\.)(\d+)(?=\.|$)")
