"""One group of storages that differ between two programs at the compared place."""

from __future__ import annotations

from dataclasses import dataclass

from memir.ir.size import Size

APPEARED, VANISHED, GREW, SHRANK, LONGER, SHORTER = "appeared", "vanished", "grew", "shrank", "lives longer", "dies earlier"
WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Change:
    """Storages of one kind, made by one operator at one line, that differ at the compared place; layers taken together."""

    what: str  # one of the words above
    kind: str
    op: str  # the operator that makes them; "" where they are alive before the step
    module: str  # with layer numbers as *; the parameter's name where `op` is empty
    source: str  # the head's line; the base's for what vanished or dies earlier
    count: int
    before: int  # bytes at the base's place
    after: int
    delta: Size  # after - before as a polynomial
    keeper: str = ""  # the line because of which autograd keeps them
    is_root: bool = True  # no operand of the operator changed: the change begins here

    @property
    def nbytes(self) -> int:
        """How many bytes more there are."""
        return self.after - self.before

    @property
    def is_of_base(self) -> bool:
        """Whether its lines of code are the base's: the head has no such storage at the place."""
        return self.what in (VANISHED, SHORTER)
