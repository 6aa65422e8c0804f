"""Operators that are put into a flat program while it is walked, whose results may still grow until all of it was seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.edit import Edit


@dataclass(slots=True)
class Placed:
    """One operator to be, ahead of the operator at `position` or behind it."""

    position: int
    behind: bool
    opcode: str
    operands: tuple[str, ...] = ()
    results: list[Value] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)
    stream: str = ""
    path: str = ""
    source: str = ""
    scratch: Size = ZERO

    def op(self) -> Op:
        """As it is now."""
        return Op(
            self.opcode,
            self.operands,
            tuple(self.results),
            frees=tuple(self.frees),
            scratch=self.scratch,
            stream=self.stream,
            path=self.path,
            source=self.source,
        )


@dataclass(slots=True)
class Placer:
    """Puts operators in at the place where a walk is, and declares what they allocate."""

    edit: Edit
    position: int = 0
    behind: bool = False
    source: str = ""  # of the operators, the file that runs them
    placed: list[Placed] = field(default_factory=list)

    def put(
        self,
        opcode: str,
        operands: tuple[str, ...] = (),
        results: Iterable[Value] = (),
        frees: Iterable[str] = (),
        stream: str = "",
        path: str = "",
    ) -> Placed:
        """The next operator at this place."""
        one = Placed(self.position, self.behind, opcode, operands, list(results), list(frees), stream, path, self.source)
        self.placed.append(one)
        return one

    def free(self, *storages: str) -> None:
        """The storages die here."""
        if storages:
            self.placed.append(Placed(self.position, self.behind, "memir.free", frees=list(storages)))

    def flat(self, name: str, dtype: str, numel: Size, kind: Kind = Kind.COLLECTIVE, device: str = "gpu") -> Value:
        """A new storage, and the tensor of one dimension that fills it; both have the name."""
        self.edit.declare(Storage(name, numel * ITEMSIZE[dtype], kind, device))
        return Value(name, dtype, (numel,), (ONE,), ZERO, name)

    def apply(self) -> None:
        """Hands the operators to the edit, in order."""
        for one in self.placed:
            (self.edit.after if one.behind else self.edit.before)(one.position, one.op())


def suffixed(name: str, suffix: str) -> str:
    """`w[3]` with `.grad` is `w.grad[3]`: the index stays last."""
    at = name.index("[") if name.endswith("]") else len(name)
    return f"{name[:at]}{suffix}{name[at:]}"


def numbered(what: str, count: int) -> str:
    """What is made for the second time is called `what.2`."""
    return f"{what}.{count}" if count > 1 else what
