"""Operators written as the Python code of a function runs them: variables hold tensors, and what no variable holds dies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ZERO, Size
from memir.parallel.holding import Holding

Shape = tuple[Size, ...]


def within(name: str, end: str) -> str:
    """A longer name; the index of a member of a family stays last: `h[3]` becomes `h/1[3]`."""
    base, bracket, index = name.partition("[")
    return f"{base}{end}{bracket}{index}"


@dataclass(slots=True)
class Frame:
    """One call. `like` gives path, source and forward_of to its operators; names begin with `name`."""

    name: str
    like: Op
    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    holding: Holding = field(default_factory=Holding)
    count: int = 0

    def run(self, opcode: str, operands: tuple[Value, ...], shape: Shape, *, dtype: str = "", strides: Shape = ()) -> Value:
        """An operator with one new tensor, which lives while a variable or `keep` holds it."""
        dtype = dtype or operands[0].dtype
        name = self.fresh()
        value = Value(name, dtype, shape, strides or contiguous(shape), ZERO, name)
        self.storages.append(Storage(name, product(shape) * ITEMSIZE[dtype], Kind.TEMPORARY))
        self.emit(replace(self.bare(), opcode=opcode, operands=tuple(v.name for v in operands), results=(value,)))
        self.holding.append("stack", (name,))
        return value

    def fresh(self) -> str:
        """A name of this call's own; the index of a member of a family stays at its end."""
        self.count += 1
        return within(self.name, f"/{self.count}")

    def bare(self) -> Op:
        """An operator of this call without anything of its own."""
        return replace(self.like, operands=(), results=(), frees=(), drops=(), saves=(), scratch=ZERO)

    def emit(self, op: Op) -> None:
        """An operator as it is."""
        self.ops.append(op)

    def view(self, value: Value, shape: Shape, offset: Size = ZERO, strides: Shape = ()) -> Value:
        """Another view of a tensor: elements from `offset` on."""
        made = replace(
            value,
            name=self.fresh(),
            shape=shape,
            strides=strides or contiguous(shape),
            offset=value.offset + offset,
        )
        self.emit(replace(self.bare(), opcode="aten.as_strided", operands=(value.name,), results=(made,)))
        return made

    def let(self, **variables: Value | None) -> None:
        """Variables are assigned, in order, and temporaries of the statement go; None deletes."""
        for name, value in variables.items():
            self.holding.put(name, () if value is None else (value.storage,))
        self.end_of_statement()

    def end_of_statement(self) -> None:
        """Temporaries die."""
        self.holding.put("stack", ())
        dead = [name for name in self.holding.reap() if any(s.name == name for s in self.storages)]
        if dead:
            self.ops[-1] = replace(self.ops[-1], frees=(*self.ops[-1].frees, *dead))

    def forget(self, *values: Value) -> None:
        """Temporaries within a statement that are used up."""
        gone = {v.storage for v in values}
        self.holding.put("stack", (s for s in self.holding.slots.get("stack", ()) if s not in gone))
        dead = [name for name in self.holding.reap() if any(s.name == name for s in self.storages)]
        if dead:
            self.ops[-1] = replace(self.ops[-1], frees=(*self.ops[-1].frees, *dead))

    def end(self, *kept: Value) -> None:
        """The call returns: all variables go but what it returns."""
        self.holding.put("returned", (v.storage for v in kept))
        for name in [n for n in self.holding.slots if n != "returned"]:
            self.holding.put(name, ())
        self.end_of_statement()
