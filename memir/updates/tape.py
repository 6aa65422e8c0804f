"""An optimizer's step written down: every operator, what it makes, and when that dies.

A `Tensor` lives as long as something in Python refers to it, as PyTorch's do. So a step is described by code whose variables
live as those of the optimizer live: what a loop overwrites dies then, a list dies with its variable, and what a function made
last dies when it returns. Names follow the parameter: `layers.3.up.weight.sqrt` is a temporary of that parameter's update.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import new_strides, product
from memir.ir.names import join
from memir.ir.opset import scratch_of
from memir.ir.size import ZERO, Size

Place = tuple[int, int]  # the stretch of layers that is walked through, and the layer's number in it


class _Store:
    """One allocation of the step."""

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str) -> None:
        self.name = name


class Tensor:
    """A value and the allocation that it keeps alive."""

    __slots__ = ("store", "value")

    def __init__(self, value: Value, store: _Store) -> None:
        self.value, self.store = value, store

    @property
    def shape(self) -> tuple[Size, ...]:
        """Extents."""
        return self.value.shape

    @property
    def dtype(self) -> str:
        """Name of the element type, `bf16`."""
        return self.value.dtype


@dataclass(frozen=True, slots=True)
class Family:
    """The layers that a parameter is trained in, `count` of them."""

    count: Size
    extent: str  # how storages with one member a layer are declared, "L"
    owner: str  # the parameters, as such a storage's `of` names them


@dataclass(slots=True, eq=False)
class Member:
    """A trained parameter with its gradient and states; `base` and `index` name it: `layers.*.up.weight`, "3".

    Of a family three members stand for all: the first, the second, the last (`memir.updates.layers`).
    """

    base: str
    index: str
    owner: str  # the parameter's storage
    parameter: Tensor  # what is updated
    gradient: Tensor
    place: Place | None = None
    family: Family | None = None
    is_embedding: bool = False  # rows are looked up in it
    is_head: bool = False  # what computes the logits
    states: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[Size, ...]:
        """The parameter's."""
        return self.parameter.shape

    @property
    def dtype(self) -> str:
        """The parameter's."""
        return self.parameter.dtype

    def named(self, suffix: str) -> str:
        """A name of its own: `layers.*.up.weight.exp_avg[3]`."""
        return join(f"{self.base}.{suffix}", (self.index,) if self.index else ())


@dataclass(slots=True)
class Tape:
    """What has been done so far. `target`: "cuda" or "cpu"; `source`: the file that the operators come from."""

    target: str
    source: str = ""
    ops: list[Op] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)  # of the operators: the layer in whose turn each stands
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)  # of what was there before: states
    place: Place | None = None
    owners: dict[str, Member] = field(default_factory=dict)  # of values and storages that are made for a parameter
    shared_states: dict[str, Tensor] = field(default_factory=dict)  # of the optimizer itself, by name
    _ended: bool = False  # the turns are over: what dies now dies in no layer's turn
    _frees: list[list[str]] = field(default_factory=list)
    _times: Counter[str] = field(default_factory=Counter)

    # -- what there is

    def keep(self, member: Member, name: str, shape: Sequence[Size], dtype: str, *, host: bool = False) -> Tensor:
        """A state of the parameter, there from step to step."""
        full = member.named(name)
        value = Value(full, dtype, tuple(shape), new_strides(shape), ZERO, full)
        self.values.append(value)
        device = "host" if host else "gpu"
        self.owners[full] = member
        self.storages.append(
            Storage(full, nbytes_of(value), Kind.OPTIMIZER_STATE, device, member.owner, live_in=True, live_out=True)
        )
        tensor = member.states[name] = Tensor(value, _Store(full))
        return tensor

    def share(self, name: str, shape: Sequence[Size], dtype: str) -> None:
        """A tensor of the optimizer itself, there from step to step."""
        value = Value(name, dtype, tuple(shape), new_strides(shape), ZERO, name)
        self.values.append(value)
        self.storages.append(Storage(name, nbytes_of(value), Kind.OPTIMIZER_STATE, live_in=True, live_out=True))
        self.shared_states[name] = Tensor(value, _Store(name))

    # -- what is done

    def each(self, members: Iterable[Member]) -> Iterator[Member]:
        """The members in turn; operators between belong to the member's layer."""
        for member in members:
            self.place = member.place
            yield member
        self.place, self._ended = None, True

    def run(self, opcode: str, *operands: Tensor | Sequence[Tensor]) -> None:
        """An operator in place."""
        self._add(opcode, _flat(operands), ())

    def make(self, member: Member, opcode: str, *operands: Tensor, shape: Sequence[Size], dtype: str) -> Tensor:
        """An operator with a result of its own."""
        (tensor,) = self._new([member], opcode, [shape], [dtype])
        self._add(opcode, _flat(operands), (tensor.value,))
        return tensor

    def make_each(self, members: Sequence[Member], opcode: str, *operands: Sequence[Tensor]) -> list[Tensor]:
        """An operator over lists, with a result like each parameter."""
        made = self._new(members, opcode, [m.shape for m in members], [m.dtype for m in members])
        self._add(opcode, _flat(operands), tuple(t.value for t in made))
        return made

    def scalar(self, name: str) -> Tensor:
        """A number that Python makes a tensor of: `torch.tensor(1.0)` fills one and hands it over (`aten.lift_fresh`)."""
        full = f"optimizer.{name}"
        self._times[full] += 1
        full += f".{self._times[full] - 1}" if self._times[full] > 1 else ""
        filled = self._unowned(f"{full}.filled")
        self._add("memir.alloc", [], (filled.value,))
        made = self._unowned(full)
        self._add("aten.lift_fresh", [filled.value], (made.value,))
        return made

    def _unowned(self, name: str) -> Tensor:
        value = Value(name, "f32", (), (), ZERO, name)
        self.storages.append(Storage(name, nbytes_of(value), Kind.TEMPORARY))
        return Tensor(value, self._store(name))

    def _store(self, name: str) -> _Store:
        """An allocation of the step, whose end is written down."""
        store = _Store(name)
        weakref.finalize(store, self.free, name).atexit = False
        return store

    def view(self, member: Member, tensor: Tensor, opcode: str, shape: Sequence[Size], strides: Sequence[Size]) -> Tensor:
        """Another handle on the same memory."""
        value = replace(tensor.value, name=self._name(member, opcode), shape=tuple(shape), strides=tuple(strides))
        self.owners[value.name] = member
        self._add(opcode, [tensor.value], (value,))
        return Tensor(value, tensor.store)

    def replaced(self, member: Member, name: str, tensor: Tensor) -> None:
        """The state is from now on this tensor, which the step made; the one before dies."""
        storage = next(s for s in self.storages if s.name == tensor.store.name)
        at = self.storages.index(storage)
        self.storages[at] = replace(storage, kind=Kind.OPTIMIZER_STATE, of=member.owner, live_out=True)
        before = member.states[name].value.storage
        at = next(k for k, s in enumerate(self.storages) if s.name == before)
        self.storages[at] = replace(self.storages[at], live_out=False)
        self.free(before)
        member.states[name] = tensor

    def free(self, storage: str) -> None:
        """The storage dies after the last operator, or after the last turn."""
        if self._ended and self.places[-1] is not None:
            self._add("memir.free", [], ())
        self._frees[-1].append(storage)

    def done(self) -> list[Op]:
        """The operators, each with what dies after it."""
        kept = {s.name for s in self.storages if s.live_out}
        return [
            replace(op, frees=tuple(name for name in frees if name not in kept))
            for op, frees in zip(self.ops, self._frees, strict=True)
        ]

    def _new(
        self, members: Sequence[Member], opcode: str, shapes: Sequence[Sequence[Size]], dtypes: Sequence[str]
    ) -> list[Tensor]:
        made = []
        for member, shape, dtype in zip(members, shapes, dtypes, strict=True):
            name = self._name(member, opcode)
            value = Value(name, dtype, tuple(shape), new_strides(shape), ZERO, name)
            self.storages.append(Storage(name, nbytes_of(value), Kind.TEMPORARY))
            self.owners[name] = member
            made.append(Tensor(value, self._store(name)))
        return made

    def _name(self, member: Member, opcode: str) -> str:
        label = opcode.split(".")[1].strip("_").removeprefix("foreach_")
        name = member.named(label)
        self._times[name] += 1
        return name if self._times[name] == 1 else member.named(f"{label}.{self._times[name] - 1}")

    def _add(self, opcode: str, operands: Sequence[Value], results: tuple[Value, ...]) -> None:
        scratch = scratch_of(self.target, opcode, operands, results)
        names = tuple(value.name for value in operands)
        self.ops.append(Op(opcode, names, results, scratch=scratch, source=self.source))
        self.places.append(self.place)
        self._frees.append([])
        self._ended = False


def _flat(operands: Sequence[Tensor | Sequence[Tensor]]) -> list[Value]:
    flat: list[Value] = []
    for operand in operands:
        flat += [operand.value] if isinstance(operand, Tensor) else [tensor.value for tensor in operand]
    return flat


def nbytes_of(value: Value) -> Size:
    """Bytes of a tensor whose elements lie one after the other."""
    return product(value.shape) * ITEMSIZE[value.dtype]


def existing(value: Value) -> Tensor:
    """A tensor that the program has already."""
    return Tensor(value, _Store(value.storage))
