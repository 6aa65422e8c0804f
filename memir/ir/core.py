"""The memory IR: one rank's step as storages, values and operators. The whole definition fits on one screen.

Frozen, hashable, no torch types. `docs/ir.md` has the text form, `memir.ir.verify` the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from memir.ir.size import ZERO, Size


class Kind(StrEnum):
    """What a storage holds: PyTorch's profiler categories, plus collective and kv_cache."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"
    COLLECTIVE = "collective"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation as the allocator sees it. `nbytes` is requested, never rounded."""

    name: str  # "w", or "w[L]" for a family of L storages made or used in a Repeat
    nbytes: Size
    kind: Kind
    device: str = "gpu"  # "gpu" or "host"
    of: str | None = None  # the parameter (its storage's name) whose gradient, state or master copy this is
    live_in: bool = False  # alive before the step's first operator
    live_out: bool = False  # alive after its last operator


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: a typed, strided view of a storage. Strides and offset count elements."""

    name: str
    dtype: str  # bf16 f16 f32 f64 i8 i16 i32 i64 u8 bool c64 f8e4m3 f8e5m2 ...
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    storage: str


@dataclass(frozen=True, slots=True)
class Op:
    """One operator. It allocates the storages of its results that are not live yet."""

    opcode: str  # "aten.mm", or a pseudo-operator "memir.alloc", "memir.free"
    operands: tuple[str, ...] = ()  # names of values
    results: tuple[Value, ...] = ()
    frees: tuple[str, ...] = ()  # storages that die right after this operator
    drops: tuple[str, ...] = ()  # storages whose last Python reference goes here while autograd still holds them
    saves: tuple[str, ...] = ()  # storages that autograd keeps because of this operator
    scratch: Size = ZERO  # workspace alive only while the operator runs, bytes
    stream: str = ""  # "" is the compute stream
    path: str = ""  # module path, "layers.0.attn.c_attn"
    source: str = ""  # "model.py:42"
    forward_of: str | None = None  # the first result's name of the forward operator this one differentiates or recomputes


@dataclass(frozen=True, slots=True)
class Repeat:
    """A stretch executed `count` times. `$h[i]` is made in iteration i; `$h[i-1]` was made by the one before."""

    index: str
    count: Size
    body: tuple[Op | Repeat, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the step, in execution order: forward, backward, optimizer, ..."""

    name: str  # "micro1-62.forward" is that of all micro-batches from 1 to 62, which are alike
    ops: tuple[Op | Repeat, ...]

    @property
    def times(self) -> int:
        """How many phases of the step it stands for."""
        numbers = self.name.partition(".")[0].removeprefix("micro").split("-")
        return int(numbers[1]) - int(numbers[0]) + 1 if len(numbers) == 2 and all(n.isdigit() for n in numbers) else 1


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's step in steady state: live-in bytes equal live-out bytes."""

    name: str
    dims: tuple[str, ...]  # symbols in the order they are printed in
    domain: tuple[str, ...]  # conditions under which the program is valid: "S <= 1024"
    mesh: tuple[tuple[str, Size], ...]  # named axes and their degrees
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]  # the tensors that exist before the first operator
    phases: tuple[Phase, ...]

    def ops(self) -> Iterator[tuple[Phase, Op]]:
        """Every operator of a flat program in order, with its phase; ValueError if there is a Repeat (`unroll` it)."""
        for phase in self.phases:
            for op in phase.ops:
                if isinstance(op, Repeat):
                    raise ValueError("the program has a Repeat: unroll it first")
                yield phase, op

    def counted(self, env: Mapping[str, int]) -> Iterator[tuple[Op, int]]:
        """Every operator in textual order and how often it is executed; `env` gives the symbols in the Repeats' counts."""
        for phase in self.phases:
            yield from _counted(phase.ops, phase.times, env)


def _counted(ops: Sequence[Op | Repeat], times: int, env: Mapping[str, int]) -> Iterator[tuple[Op, int]]:
    for op in ops:
        if isinstance(op, Repeat):
            yield from _counted(op.body, times * op.count.evaluate(env), env)
        else:
            yield op, times
