"""The rules every program keeps; docs/ir.md lists them. What breaks one is shown among the operators around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from memir.errors import UsageError, VerifyError
from memir.ir.core import Op, Program, Repeat
from memir.ir.declarations import check_declarations
from memir.ir.domain import Condition, points
from memir.ir.extents import Extents
from memir.ir.names import split
from memir.ir.printer import Printer
from memir.ir.unroll import Unrolled, extents, has_repeats, unroll_located

_AROUND = 2  # operators shown before and after the one that breaks a rule
_TRIED = 3  # numbers of iterations for which a program with symbolic counts is checked


def verify(program: Program) -> None:
    """VerifyError if the program breaks a rule of the IR; nothing otherwise.

    A program with Repeats is checked unrolled: numeric counts in full, symbolic ones for the three smallest numbers of
    iterations that the domain allows.
    """
    check_declarations(program)
    if not has_repeats(program):
        sizes = (sum(len(p.ops) for p in program.phases), len(program.storages), len(program.values))
        _Flow(Unrolled(program, *(list(range(n)) for n in sizes)), "").check()
        return
    for env in _counts(program):
        try:
            flat = unroll_located(program, env)
        except UsageError as error:
            raise VerifyError(error.message, where=error.where, hint=error.hint) from None
        given = ", ".join(f"{symbol}={number}" for symbol, number in env.items())
        _Flow(flat, f" (unrolled with {given})" if given else " (unrolled)").check()


def _counts(program: Program) -> list[dict[str, int]]:
    """Values to unroll with: those symbols that count iterations or members of families."""
    declared = [s.name for s in program.storages] + [v.name for v in program.values]
    symbols = {s for name in declared for e in extents(name) for s in e.symbols()}

    def collect(ops: Sequence[Op | Repeat]) -> None:
        for op in ops:
            if isinstance(op, Repeat):
                symbols.update(op.count.symbols())
                collect(op.body)

    for phase in program.phases:
        collect(phase.ops)
    names = [d for d in program.dims if d in symbols]
    own = [text for text in program.domain if (c := Condition.read(text)) and c.symbols() <= set(names)]
    found = sorted(points(names, own, limit=_TRIED * 8 ** (len(names) - 1)), key=lambda env: sum(env.values()))[:_TRIED]
    if not found:
        raise VerifyError(f"no small values of {', '.join(names)} satisfy the domain", where="\n".join(own))
    return found


class _Flow:
    """Follows a flat program's storages from birth to death."""

    def __init__(self, unrolled: Unrolled, note: str) -> None:
        self._unrolled = unrolled
        self._program = program = unrolled.program
        self._note = note
        self._ops = [(phase, op) for phase in program.phases for op in phase.ops]
        self._storages = {s.name: s for s in program.storages}
        self._live = {s.name for s in program.storages if s.live_in}
        self._freed: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._values = {v.name: v.storage for v in program.values}
        self._extents = Extents(program.dims, program.domain)

    def check(self) -> None:
        for place, value in enumerate(self._program.values):
            if value.storage not in self._live:
                self._fail_value(place, f"%{value.name} exists before the first operator, but ${value.storage} is not live_in")
            if (problem := self._extents.problem(value, self._storages[value.storage])) is not None:
                self._fail_value(place, problem)
        for number, (_, op) in enumerate(self._ops):
            if isinstance(op, Repeat):
                raise VerifyError(f"the number of iterations over {op.index} is not a number: {op.count}")
            self._op(number, op)
        self._end()

    def _op(self, number: int, op: Op) -> None:
        for operand in op.operands:
            self._operand(number, operand)
        if op.forward_of is not None and op.forward_of not in self._values:
            self._fail(number, f"forward of %{op.forward_of}, which is not defined before this operator")
        for result in op.results:
            if result.name in self._values:
                self._fail(number, f"%{result.name} is defined a second time")
            if result.storage not in self._live:
                self._allocate(number, result.storage)
            if (problem := self._extents.problem(result, self._storages[result.storage])) is not None:
                self._fail(number, problem)
            self._values[result.name] = result.storage
        if not op.scratch.is_nonnegative and self._extents.negative_at(op.scratch) is not None:
            self._fail(number, f"the scratch of {op.scratch} bytes is negative")
        for name in op.saves:
            self._must_live(number, name, "saves")
        for name in op.drops:
            self._must_live(number, name, "drops")
            if name in self._dropped:
                self._fail(number, f"drops ${name} a second time, after operator {self._dropped[name] + 1}")
            self._dropped[name] = number
        for name in op.frees:
            self._must_live(number, name, "frees")
            if self._storages[name].live_out:
                self._fail(number, f"frees ${name}, which is live_out")
            self._live.remove(name)
            self._freed[name] = number

    def _operand(self, number: int, operand: str) -> None:
        storage = self._values.get(operand)
        if storage is None:
            self._fail(number, f"uses %{operand}, which is not defined before this operator", hint=self._hint(operand))
        if storage not in self._live:
            died = self._freed[storage] + 1
            self._fail(number, f"uses %{operand} after its storage ${storage} was freed by operator {died}")

    def _allocate(self, number: int, name: str) -> None:
        if name not in self._storages:
            self._fail(number, f"${name} is not declared", hint=self._hint(name))
        if name in self._freed:
            died = self._freed[name] + 1
            self._fail(
                number,
                f"allocates ${name} a second time; it was freed by operator {died}",
                hint="a storage is allocated once; one made in a Repeat has its index, $h[i]",
            )
        self._live.add(name)

    def _must_live(self, number: int, name: str, verb: str) -> None:
        if name in self._live:
            return
        if name not in self._storages:
            self._fail(number, f"{verb} ${name}, which is not declared", hint=self._hint(name))
        if name in self._freed:
            died = self._freed[name]
            if died == number:
                self._fail(number, f"{verb} ${name} twice")
            self._fail(number, f"{verb} ${name}, which was freed by operator {died + 1}")
        self._fail(number, f"{verb} ${name}, which is not allocated yet")

    def _end(self) -> None:
        for name, number in self._dropped.items():
            if self._storages[name].live_out:
                self._fail(number, f"drops ${name}, which is live_out: somebody still holds it")
        for place, storage in enumerate(self._program.storages):
            if storage.name in self._live and not storage.live_out:
                self._fail_storage(place, f"${storage.name} is never freed", "free it, or mark it live_out")
            if storage.name not in self._live and storage.name not in self._freed:
                self._fail_storage(place, f"${storage.name} is never allocated", "remove it, or mark it live_in")

    def _fail(self, number: int, message: str, *, hint: str = "") -> NoReturn:
        """Raise, with the operators around the one of that number."""
        printer = Printer(self._program.dims)
        first, last = max(0, number - _AROUND), min(len(self._ops), number + _AROUND + 1)
        width = len(str(last))
        lines = []
        for k in range(first, last):
            op = self._ops[k][1]
            text = printer.op(op) if isinstance(op, Op) else printer.repeat(op)
            lines.append(f"{'>' if k == number else ' '} {k + 1:{width}}  {text}")
        where = f"phase {self._ops[number][0].name}, operator {number + 1}{self._note}"
        raise VerifyError(message, where="\n".join([where, *lines]), hint=hint, place=("op", self._unrolled.ops[number]))

    def _fail_storage(self, place: int, message: str, hint: str) -> NoReturn:
        storage = self._program.storages[place]
        where = Printer(self._program.dims).storage(storage) + self._note
        raise VerifyError(message, where=where, hint=hint, place=("storage", self._unrolled.storages[place]))

    def _fail_value(self, place: int, message: str) -> NoReturn:
        where = f"value {Printer(self._program.dims).value(self._program.values[place])}{self._note}"
        raise VerifyError(message, where=where, place=("value", self._unrolled.values[place]))

    def _hint(self, name: str) -> str:
        """What else goes by that name, but for its indices."""
        base = split(name)[0]
        known = [n for n in (*self._values, *self._storages) if split(n)[0] == base and n != name]
        return f"there is {', '.join(dict.fromkeys(known[:3]))}" if known else ""
