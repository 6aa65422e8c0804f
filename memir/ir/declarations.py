"""The rules of a program's declarations: names, kinds, symbols, steady state. They need no unrolling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from memir.errors import VerifyError
from memir.ir.core import Kind, Op, Program, Repeat, Value
from memir.ir.layout import product
from memir.ir.names import split
from memir.ir.printer import Printer
from memir.ir.size import ZERO, Size
from memir.ir.sizetext import IDENTIFIER
from memir.ir.unroll import extents

_DEVICES = ("gpu", "host")
_KINDS = frozenset(Kind)


def check_declarations(program: Program) -> None:
    """VerifyError if a declaration breaks a rule, or an operator uses a symbol that is not declared."""
    _check_dims(program)
    _check_storages(program)
    _check_values(program)
    _check_steady(program)
    _Ops(program).check()


def member_count(name: str) -> Size:
    """How many storages a declared name stands for: `kv[L, :2]` -> 2*L."""
    return product(extents(name))


def _check_dims(program: Program) -> None:
    for symbol in program.dims:
        if not IDENTIFIER.fullmatch(symbol):
            raise VerifyError(f"the symbol {symbol!r} is not an identifier")
    if len(set(program.dims)) != len(program.dims):
        raise VerifyError("a symbol is declared twice", where="dim " + ", ".join(program.dims))
    axes = [axis for axis, _ in program.mesh]
    if len(set(axes)) != len(axes):
        raise VerifyError("a mesh axis is declared twice", where=", ".join(axes))
    for axis, degree in program.mesh:
        _known_symbols(program, (degree,), f"mesh {axis}")


def _check_storages(program: Program) -> None:
    seen: set[str] = set()
    declared = {s.name for s in program.storages}
    families = {split(s.name)[0] for s in program.storages if extents(s.name)}
    for place, storage in enumerate(program.storages):
        problem = ""
        of_member = storage.of is not None and bool(split(storage.of)[1]) and split(storage.of)[0] in families
        if storage.name in seen:
            problem = f"${storage.name} is declared twice"
        elif storage.kind not in _KINDS:
            problem = f"${storage.name} has an unknown kind, {storage.kind}"
        elif storage.device not in _DEVICES:
            problem = f"${storage.name} is on an unknown device, {storage.device}; known: {', '.join(_DEVICES)}"
        elif storage.of is not None and storage.of not in declared and not of_member:
            problem = f"${storage.name} belongs to ${storage.of}, which is not declared"
        elif storage.nbytes.is_constant and storage.nbytes.constant < 0:
            problem = f"${storage.name} has a negative size"
        elif unknown := _unknown((storage.nbytes, *extents(storage.name)), program.dims):
            problem = f"${storage.name} has a size over {unknown}, which is not among the dims"
        if problem:
            raise VerifyError(problem, where=Printer(program.dims).storage(storage), place=("storage", place))
        seen.add(storage.name)


def _check_values(program: Program) -> None:
    declared = {s.name for s in program.storages}
    seen: set[str] = set()
    for place, value in enumerate(program.values):
        problem = ""
        if value.name in seen:
            problem = f"%{value.name} is declared twice"
        elif value.storage not in declared:
            problem = f"%{value.name} lies in ${value.storage}, which is not declared"
        elif extents(value.storage) and split(value.name)[1] != split(value.storage)[1]:
            problem = f"%{value.name} lies in the family ${value.storage} and must have its indices"
        elif unknown := _unknown((*_sizes(value), *extents(value.name)), program.dims):
            problem = f"%{value.name} has a size over {unknown}, which is not among the dims"
        if problem:
            raise VerifyError(problem, where=f"value {Printer(program.dims).value(value)}", place=("value", place))
        seen.add(value.name)


def _check_steady(program: Program) -> None:
    """One step leaves as many bytes as it found."""
    sums = {"live_in": ZERO, "live_out": ZERO}
    for device in _DEVICES:
        for flag in sums:
            sums[flag] = ZERO
            for storage in program.storages:
                if storage.device == device and getattr(storage, flag):
                    sums[flag] = sums[flag] + storage.nbytes * member_count(storage.name)
        difference = sums["live_in"] - sums["live_out"]
        if difference.terms:
            _fail_steady(program, device, difference)


def _fail_steady(program: Program, device: str, difference: Size) -> NoReturn:
    printer = Printer(program.dims)
    on_host = " on the host" if device == "host" else ""
    only = [s for s in program.storages if s.live_in != s.live_out and s.device == device]
    lines = [printer.storage(s) for s in only[:5]] + ([f"... and {len(only) - 5} more"] if len(only) > 5 else [])
    raise VerifyError(
        f"not a steady state: bytes live at the step's start{on_host} minus those at its end are {printer.size(difference)}",
        where="\n".join(["live at one end only:", *lines]),
    )


class _Ops:
    """Walks operators and Repeats in textual order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._printer = Printer(program.dims)
        self._known: set[tuple[Size, ...]] = set()
        self._place = -1

    def check(self) -> None:
        for phase in self._program.phases:
            self._walk(phase.ops, ())

    def _walk(self, ops: Sequence[Op | Repeat], indices: tuple[str, ...]) -> None:
        for op in ops:
            self._place += 1
            if isinstance(op, Op):
                self._op(op, indices)
            else:
                self._repeat(op, indices)

    def _repeat(self, repeat: Repeat, indices: tuple[str, ...]) -> None:
        if not IDENTIFIER.fullmatch(repeat.index):
            self._fail(repeat, f"the index {repeat.index!r} is not an identifier")
        if repeat.index in indices or repeat.index in self._program.dims:
            self._fail(repeat, f"the index {repeat.index} is already a symbol here")
        if unknown := _unknown((repeat.count,), self._program.dims):
            self._fail(repeat, f"the count is over {unknown}, which is not among the dims")
        self._walk(repeat.body, (*indices, repeat.index))

    def _op(self, op: Op, indices: tuple[str, ...]) -> None:
        if op.opcode == "memir.free" and (op.operands or op.results or not op.frees):
            self._fail(op, "memir.free has no operands and no results, and frees something")
        if op.opcode == "memir.alloc" and (op.operands or not op.results):
            self._fail(op, "memir.alloc has no operands, and results in what it allocates")
        symbols = (*self._program.dims, *indices)
        for sizes in (op.scratch,), *map(_sizes, op.results):
            if sizes not in self._known and (unknown := _unknown(sizes, symbols)):
                self._fail(op, f"a size is over {unknown}, which is not among the dims")
            if not indices:
                self._known.add(sizes)

    def _fail(self, op: Op | Repeat, message: str, *, hint: str = "") -> NoReturn:
        text = self._printer.op(op) if isinstance(op, Op) else self._printer.repeat(op)
        raise VerifyError(message, where=text, hint=hint, place=("op", self._place))


def _sizes(value: Value) -> tuple[Size, ...]:
    return (*value.shape, *value.strides, value.offset)


def _unknown(sizes: Iterable[Size], known: Sequence[str]) -> str:
    """A symbol that is not known; empty if there is none."""
    return next((s for size in sizes if size.terms for s in sorted(size.symbols()) if s not in known), "")


def _known_symbols(program: Program, sizes: Iterable[Size], where: str) -> None:
    if unknown := _unknown(sizes, program.dims):
        raise VerifyError(f"a size is over {unknown}, which is not among the dims", where=where)
