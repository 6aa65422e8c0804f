"""A program's operators and names with symbols bound to numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memir.errors import UsageError
from memir.ir.core import Op, Value
from memir.ir.names import Index, is_range, join, rename, rename_path, spread
from memir.ir.size import Size


class Bound:
    """Symbols bound to numbers, and the names of values that are local to the iterations around."""

    def __init__(self, env: Mapping[str, int], expand: bool, local: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.env = env
        self.expand = expand  # whether ranges of members are written out
        self.local = local or {}  # value made in a body without an index -> the indices it has in fact
        self._sizes: dict[Size, Size] = {}
        self._groups: dict[tuple[Size, ...], tuple[Size, ...]] = {}
        self._names: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self._indices: dict[Index, str] = {}
        self._braces: dict[str, str] = {}

    def size(self, size: Size) -> Size:
        """A size. UsageError where it is not whole."""
        found = self._sizes.get(size)
        if found is None:
            try:
                found = self._sizes[size] = size.substitute(self.env)
            except (ValueError, ZeroDivisionError):  # a shard such as B*S*t^-1 with t=3 and S=4
                given = ", ".join(f"{s}={self.env[s]}" for s in sorted(size.symbols() & self.env.keys()))
                raise UsageError(f"{size} is not a whole number for {given}") from None
        return found

    def group(self, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        """Several sizes."""
        found = self._groups.get(sizes)
        if found is None:
            found = self._groups[sizes] = tuple(self.size(s) for s in sizes)
        return found

    def storage(self, name: str) -> str:
        """A storage's name."""
        found = self._names.get(name)
        if found is None:
            try:
                found = self._names[name] = rename(name, self.env, self._indices)
            except ValueError as error:  # an index over a shard
                raise UsageError(f"{name}: {error}") from None
        return found

    def storages(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Storages' names, ranges written out where that is wanted."""
        if not names:
            return ()
        known = self._names
        return self.spread(tuple([known[n] if n in known else self.storage(n) for n in names]))

    def spread(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names, ranges of members written out where that is wanted."""
        try:
            return spread(names) if self.expand else names
        except ValueError as error:
            raise UsageError(str(error)) from None

    def value(self, name: str) -> str:
        """A value's name."""
        found = self._values.get(name)
        if found is None:
            found = join(name, self.local[name]) if name in self.local else self.storage(name)
            self._values[name] = found
        return found

    def values(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Values' names, ranges written out where that is wanted."""
        if not names:
            return ()
        known = self._values
        return self.spread(tuple([known[n] if n in known else self.value(n) for n in names]))

    def path(self, path: str) -> str:
        """A module's path."""
        found = self._paths.get(path)
        if found is None:
            found = self._paths[path] = rename_path(path, self.env, self._braces)
        return found

    def tensor(self, value: Value) -> Value:
        """A value."""
        return Value(
            self.value(value.name),
            value.dtype,
            self.group(value.shape),
            self.group(value.strides),
            self.size(value.offset),
            self.storage(value.storage),
        )

    def results(self, results: tuple[Value, ...]) -> tuple[Value, ...]:
        """The results, one for each member of a range where ranges are written out."""
        if not results:
            return ()
        tensors = tuple([self.tensor(r) for r in results])
        if not self.expand or not [t for t in tensors if is_range(t.name)]:
            return tensors
        members = []
        for tensor in tensors:
            names, storages = self.spread((tensor.name,)), self.spread((tensor.storage,))
            if len(names) != len(storages):
                raise UsageError(f"%{tensor.name} and ${tensor.storage} have not as many members")
            members += [replace(tensor, name=n, storage=s) for n, s in zip(names, storages, strict=True)]
        return tuple(members)

    def op(self, op: Op) -> Op:
        """An operator."""
        return Op(
            op.opcode,
            self.values(op.operands),
            self.results(op.results),
            self.storages(op.frees),
            self.storages(op.drops),
            self.storages(op.saves),
            self.size(op.scratch),
            op.stream,
            self.path(op.path),
            op.source,
            None if op.forward_of is None else self.value(op.forward_of),
        )
