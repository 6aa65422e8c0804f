"""Symbols of a program replaced by sizes over other symbols: `d` by `h/a`, a number by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memir.errors import UsageError
from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.domain import Condition
from memir.ir.size import ONE, ZERO, Size


def substituted(program: Program, env: Mapping[str, Size | int], dims: Sequence[str]) -> Program:
    """The program over `dims`, names and their indices kept. UsageError where a size is not whole then."""
    return _Substitution(env).program(program, dims)


class _Substitution:
    def __init__(self, env: Mapping[str, Size | int]) -> None:
        self.env = env
        self._sizes: dict[Size, Size] = {}

    def program(self, program: Program, dims: Sequence[str]) -> Program:
        return replace(
            program,
            dims=tuple(dims),
            domain=tuple(filter(None, dict.fromkeys(condition_with(text, self.env, dims) for text in program.domain))),
            mesh=tuple((axis, self.size(degree)) for axis, degree in program.mesh),
            storages=tuple(replace(s, nbytes=self.size(s.nbytes)) for s in program.storages),
            values=tuple(self.value(v) for v in program.values),
            phases=tuple(replace(phase, ops=tuple(self.op(op) for op in phase.ops)) for phase in program.phases),
        )

    def size(self, size: Size) -> Size:
        found = self._sizes.get(size)
        if found is None:
            try:
                found = size.substitute(self.env)
            except ValueError:
                symbols = ", ".join(sorted(size.symbols() & self.env.keys()))
                raise UsageError(f"{size} is not whole where {symbols} is replaced", hint="keep it as a symbol") from None
            self._sizes[size] = found
        return found

    def value(self, value: Value) -> Value:
        return replace(
            value,
            shape=tuple(self.size(s) for s in value.shape),
            strides=tuple(self.size(s) for s in value.strides),
            offset=self.size(value.offset),
        )

    def op(self, op: Op | Repeat) -> Op | Repeat:
        if isinstance(op, Repeat):
            return replace(op, count=self.size(op.count), body=tuple(self.op(inner) for inner in op.body))
        return replace(op, results=tuple(self.value(r) for r in op.results), scratch=self.size(op.scratch))


def condition_with(text: str, env: Mapping[str, Size | int], dims: Sequence[str]) -> str:
    """A condition with symbols replaced, divisors multiplied out: `d <= 8` with d = h/a is `h <= 8*a`; "" if it holds."""
    condition = Condition.read(text)
    if condition is None or not condition.symbols() & env.keys():
        return text
    condition = condition.substitute(env)
    scale = _divisor(condition.left, condition.modulus, condition.right)
    condition = Condition(condition.left * scale, condition.modulus * scale, condition.sign, condition.right * scale)
    if condition.holds({}):
        return ""
    if condition.modulus is not ZERO and condition.sign == "==" and condition.right is ZERO:
        return f"{condition.modulus.text(dims)} divides {condition.left.text(dims)}"
    return condition.text(dims)


def _divisor(*sizes: Size) -> Size:
    """The product of symbols that all terms of the sizes are divided by at most."""
    lowest: dict[str, int] = {}
    for size in sizes:
        if size is ZERO:
            continue
        for monomial, _ in size.terms:
            for atom, exponent in monomial:
                if isinstance(atom, str):
                    lowest[atom] = min(lowest.get(atom, 0), exponent)
    result = ONE
    for name, exponent in lowest.items():
        result = result * Size.of(name) ** -exponent
    return result
