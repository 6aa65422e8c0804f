"""FSDP's parameter groups of a step: one for each unit, with what each rank holds of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Program, Storage, Value
from memir.ir.size import ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.shards import Chunk, Shard, chunk_of
from memir.parallel.units import ROOT, units_of
from memir.rewrite.flow import Flow


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a group."""

    chunk: Chunk
    value: Value  # before the step, as traced
    gradient: str | None  # the storage of its whole gradient; None: frozen
    offset: Size = ZERO  # in a flat parameter, elements

    @property
    def parameter(self) -> str:
        """Its storage."""
        return self.value.storage


@dataclass(slots=True)
class Group:
    """FSDPParamGroup: the parameters of a unit, and their state."""

    path: str  # of the module, "" for the root
    layer: int  # that it is or lies in, or ROOT
    members: tuple[Member, ...]
    dtype: str = ""  # of a flat parameter
    pending: str = ""  # the storage of an all-gather that nobody has waited for
    gathers: int = 0  # how often it was gathered in the step
    reductions: int = 0
    indices: list[int] = field(default_factory=list)  # _post_forward_indices
    done: bool = False  # its post_backward has run in this backward
    output: str = ""  # the storage of its sharded gradients
    clones: dict[str, Value] = field(default_factory=dict)  # parameter -> its part for fewer ranks, after forward
    all_reduce_state: str = ""  # the storage of gradients that were all-reduced and then cast

    def buffer(self, what: str) -> str:
        """The name of one of its storages: `layers.*.all_gather[3]`, or `all_gather` of the root."""
        parts = self.path.split(".")
        if self.layer == ROOT or str(self.layer) not in parts:
            return f"{self.path}.{what}" if self.path else what
        at = parts.index(str(self.layer))
        return ".".join([*parts[:at], "*", *parts[at + 1 :], what]) + f"[{self.layer}]"

    @property
    def trained(self) -> list[Member]:
        """The members that have a gradient."""
        return [m for m in self.members if m.gradient is not None]


def groups_of(flow: Flow, degree: Size, rank: int) -> dict[str, Group]:
    """A unit's path to its group. UsageError, InconclusiveError: a parameter that FSDP does not shard."""
    values = tensors_of(flow)
    gradients = gradient_storages(flow)
    return {
        unit.path: Group(unit.path, unit.layer, tuple(_member(s, values, gradients, degree, rank) for s in unit.parameters))
        for unit in units_of(flow)
    }


def tensors_of(flow: Flow) -> dict[str, Value]:
    """A storage to its first tensor before the step."""
    values: dict[str, Value] = {}
    for value in flow.program.values:
        values.setdefault(value.storage, value)
    return values


def gradient_storages(flow: Flow) -> dict[str, str]:
    """A parameter's storage to that of the gradient that the step makes."""
    return {s.of: s.name for s in flow.program.storages if s.kind == Kind.GRADIENT and s.of and s.name in flow.born}


def _member(storage: Storage, values: Mapping[str, Value], gradients: Mapping[str, str], degree: Size, rank: int) -> Member:
    value = values.get(storage.name)
    if value is None:
        raise InconclusiveError("a parameter has no tensor before the step", where=storage.name)
    return Member(chunk_of(value.shape, degree, rank, storage.name), value, gradients.get(storage.name))


def trained_dtype(program: Program) -> str:
    """The type of the trained parameters, or of all where none is. InconclusiveError where there are several."""
    parameters = {s.name for s in program.storages if s.kind == Kind.PARAMETER}
    trained = {s.of for s in program.storages if s.kind == Kind.GRADIENT} & parameters
    dtypes = {v.dtype for v in program.values if v.storage in (trained or parameters)}
    if len(dtypes) != 1:  # FSDPParamGroup._init_mp_dtypes
        where = f"program @{program.name}: {', '.join(sorted(dtypes)) or 'none'}"
        raise InconclusiveError("FSDP wants trained parameters of one type", where=where)
    return dtypes.pop()


def shards_of(
    groups: Mapping[str, Group], gradients: Mapping[str, Value], dtype_of: Callable[[Value], str], device: str
) -> list[Shard]:
    """The parameters' shards, with their gradients, for `shard_states`."""
    return [
        Shard(m.parameter, m.chunk.shape, dtype_of(m.value), gradients.get(m.parameter), m.chunk.padded, device)
        for group in groups.values()
        for m in group.members
    ]


BEFORE = "sharded_grad.before"  # what the sharded gradients of the step before are called


def sharded_gradients(edit: Edit, groups: Mapping[str, Group], *, kept: bool = False) -> None:
    """The sharded gradients of a group, one storage, die with the last of them; those of the step before too.

    With zero_grad first a rank's gradients of the step before are alive at the start, as many bytes as the step leaves. With
    `kept` they live until the next step in any case, and who calls this frees those of the step before.
    """
    storages = {s.name: s for s in edit.flow.program.storages}
    for group in groups.values():
        trained = {m.parameter: m.gradient for m in group.members if m.gradient is not None}
        if not trained:
            continue
        living = {storages[name].live_out for name in trained.values()}
        before = [s.name for s in storages.values() if s.kind == Kind.GRADIENT and s.live_in and s.of in trained]
        if len(living) != 1 or (before and len(before) != len(trained)):
            raise InconclusiveError("some gradients of a unit outlive the step and some do not", where=f"@{group.path}")
        new = edit.storage(group.output)
        _end(edit, "" if kept else new.name, trained.values())
        for name in trained.values():
            edit.storages[name] = replace(storages[name], live_out=False)
        if kept or living.pop():
            edit.storages[new.name] = replace(new, live_out=True)
        if kept or before:
            old = edit.declare(replace(new, name=group.buffer(BEFORE), live_in=True))
            _end(edit, "" if kept else old, before)
            for name in before:
                edit.forget(name)
                edit.values.update({v.name: None for v in edit.flow.program.values if v.storage == name})


def _end(edit: Edit, storage: str, parts: Iterable[str]) -> None:
    """The storage, if it is given, dies where the last of those died that it stands for."""
    ends = [edit.take_free(name) for name in parts]
    last = max((end for end in ends if end is not None), default=None)
    if storage and last is not None:
        op = edit.op(last)
        edit.put(last, replace(op, frees=(*op.frees, storage)))
