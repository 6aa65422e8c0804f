"""Parameters that have their whole data only while they are needed: which storage they lie in at each operator.

A resized storage is a new one in the IR (docs/memory-model.md). So each time a parameter is gathered it gets a storage more,
and views that were made of an earlier one (the transposed weight that a matrix product saved) are results of the copy-out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Value
from memir.ir.size import ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.placed import Placed, suffixed


@dataclass(slots=True)
class Unsharded:
    """A walk through forward and backward of `edit`'s program; `parameters`: storage -> its tensor before the step."""

    edit: Edit
    parameters: Mapping[str, Value]
    storage: dict[str, str] = field(default_factory=dict)  # parameter -> the storage its data is in now
    offset: dict[str, Size] = field(default_factory=dict)  # parameter -> where in that storage, elements
    copy_out: dict[str, Placed] = field(default_factory=dict)  # parameter -> what made that storage
    times: dict[str, int] = field(default_factory=dict)  # parameter -> how often it was gathered
    suffix: dict[str, str] = field(default_factory=dict)  # parameter -> what its storage's name and its views' end in
    made_in: dict[str, str] = field(default_factory=dict)  # a view -> the storage in which it was made
    known: dict[tuple[str, str], str] = field(default_factory=dict)  # a view and a storage -> its name there
    values: dict[str, Value] = field(default_factory=dict)  # of the program as it was

    def __post_init__(self) -> None:
        self.values = {v.name: v for v in self.parameters.values()}
        self.values |= {r.name: r for op in self.edit.flow.ops for r in op.results if r.storage in self.parameters}

    def gathered(self, parameter: str, copy_out: Placed, storage: str = "", offset: Size = ZERO) -> str:
        """The parameter is whole from `copy_out` on, which gets the result; the storage's name, to be declared.

        With `storage` it lies in that one, `offset` elements from its start.
        """
        count = self.times[parameter] = self.times.get(parameter, 0) + 1
        suffix = self.suffix[parameter] = f".unsharded.{count}" if count > 1 else ".unsharded"
        name = storage or suffixed(parameter, suffix)
        self.offset[parameter] = offset
        self.storage[parameter], self.copy_out[parameter] = name, copy_out
        self._again(parameter, self.parameters[parameter].name)
        return name

    def resharded(self, parameter: str) -> str:
        """The parameter is a shard again; the storage that dies."""
        del self.copy_out[parameter]
        return self.storage.pop(parameter)

    def name_of(self, parameter: str) -> str:
        """The parameter's own tensor where it lies now."""
        return self._again(parameter, self.parameters[parameter].name)

    def is_whole(self, parameter: str) -> bool:
        """Whether its data is there."""
        return parameter in self.storage

    def rewrite(self, position: int) -> None:
        """The operator reads and makes its views of parameters where they lie now. InconclusiveError if one is a shard."""
        flow = self.edit.flow
        op = flow.ops[position]
        names = {o: self._now(o, position) for o in op.operands if flow.storage[o] in self.parameters}
        results = {r.name: self._placed(r, position) for r in op.results if r.storage in self.parameters}
        saved = {name: self.storage.get(name, name) for name in (*op.saves, *op.drops) if name in self.parameters}
        if not (names or results or saved):
            return
        now = self.edit.op(position)
        self.edit.put(
            position,
            replace(
                now,
                operands=tuple(names.get(o, o) for o in now.operands),
                results=tuple(results.get(r.name, r) for r in now.results),
                saves=tuple(saved.get(s, s) for s in now.saves),
                drops=tuple(d for d in now.drops if d not in saved),
            ),
        )

    def _placed(self, result: Value, position: int) -> Value:
        storage = self._where(result.storage, position)
        self.made_in[result.name] = storage
        return replace(result, storage=storage, offset=result.offset + self.offset[result.storage])

    def _now(self, operand: str, position: int) -> str:
        parameter = self.edit.flow.storage[operand]
        if self.made_in.get(operand) == self._where(parameter, position):
            return operand
        return self._again(parameter, operand)

    def _again(self, parameter: str, value: str) -> str:
        """The name of a view, made before, in the storage of now."""
        storage = self.storage[parameter]
        found = self.known.get((value, storage))
        if found is None:
            old = self.values[value]
            found = self.known[value, storage] = suffixed(value, self.suffix[parameter])
            self.copy_out[parameter].results.append(
                replace(old, name=found, storage=storage, offset=old.offset + self.offset[parameter])
            )
        return found

    def _where(self, parameter: str, position: int) -> str:
        storage = self.storage.get(parameter)
        if storage is None:
            op = self.edit.flow.ops[position]
            where = " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))
            raise InconclusiveError(f"parameter {parameter} is read where it is a shard", where=where)
        return storage
