"""Repeats expanded and symbols bound. docs/ir.md, "Names in a Repeat", has the rules that this follows."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memir.errors import UsageError
from memir.ir.bound import Bound
from memir.ir.core import Op, Phase, Program, Repeat, Storage, Value
from memir.ir.domain import bind_domain
from memir.ir.names import Index, index_text, is_range, join, split
from memir.ir.size import Size
from memir.ir.written import Written

MAX_OPS = 5_000_000  # about 5 GB of operators; more is a typing error, not a wish


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A flat program, and where each of its operators, storages and values comes from.

    An origin is a place in the folded program, from 0: operators and Repeats are numbered together, in textual order.
    """

    program: Program
    ops: list[int]
    storages: list[int]
    values: list[int]


def unroll(program: Program, env: Mapping[str, int] | None = None) -> Program:
    """Every Repeat whose count is a number, or becomes one with `env`, written out; `env` is bound everywhere else too.

    Families become their members (`$w[L]` -> `$w[0]`, `$w[1]`, ...). A Repeat whose count stays a symbol stays. UsageError if
    a count is negative, if `env` names an unknown symbol or leaves the domain, or if the result would have over 5 million
    operators.
    """
    return _rewrite(program, env or {}, expand=True).program


def unroll_located(program: Program, env: Mapping[str, int] | None = None) -> Unrolled:
    """`unroll` with the origins."""
    return _rewrite(program, env or {}, expand=True)


class Unrolls:
    """A program unrolled at several numbers of layers, each once; what is equal in two of them is the same object."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[tuple[str, int], ...], Unrolled] = {}
        self._written: dict[tuple[str, ...], Written] = defaultdict(Written)  # by the symbols that are bound

    def at(self, env: Mapping[str, int]) -> Unrolled:
        """The flat program at the values that `env` has of its symbols; the same object each time."""
        own = tuple((name, env[name]) for name in self.program.dims if name in env)
        if own not in self._known:
            written = self._written[tuple(name for name, _ in own)]
            self._known[own] = _rewrite(self.program, dict(own), expand=True, written=written)
        return self._known[own]


def bind(program: Program, env: Mapping[str, int]) -> Program:
    """The program for these values of symbols, Repeats and families kept (`$w[L]` -> `$w[:32]`). Errors as `unroll`."""
    return _rewrite(program, env, expand=False).program


def bound_header(program: Program, env: Mapping[str, int]) -> Program:
    """The program with its dims and domain bound, and the rest as it is: for what reads the header only. Errors as `unroll`."""
    dims = tuple(d for d in program.dims if d not in env)
    return replace(program, dims=dims, domain=bind_domain(program.domain, env, dims)) if env else program


def has_repeats(program: Program) -> bool:
    """Whether there is a Repeat or a family in it."""
    names = [s.name for s in program.storages] + [v.name for v in program.values]
    return any(extents(name) for name in names) or any(isinstance(op, Repeat) for phase in program.phases for op in phase.ops)


def extents(name: str) -> tuple[Size, ...]:
    """The extents of a declared name: `w[L]` -> (L), `kv[3, :2]` -> (2), `w` and `w[3]` -> ()."""
    return tuple(i.size for i in split(name)[1] if i.is_extent and i.size is not None)


def _rewrite(program: Program, env: Mapping[str, int], *, expand: bool, written: Written | None = None) -> Unrolled:
    for symbol, number in env.items():
        if symbol not in program.dims:
            known = f"its symbols: {', '.join(program.dims)}" if program.dims else "it has none"
            raise UsageError(f"the program has no symbol {symbol}", hint=known)
        if number < 1:
            raise UsageError(f"{symbol} must be a positive number, not {number}")
    dims = tuple(d for d in program.dims if d not in env)
    domain = bind_domain(program.domain, env, dims)
    bound = Bound(env, expand)
    length = sum(_length(phase.ops, bound, expand) for phase in program.phases)
    if length > MAX_OPS:
        raise UsageError(f"the program unrolls to {length:,} operators, more than {MAX_OPS:,}", hint="bind smaller numbers")
    make = Storage if written is None else written.storage
    storages = [(s, place) for place, storage in enumerate(program.storages) for s in _storages(storage, bound, expand, make)]
    values = [(v, place) for place, value in enumerate(program.values) for v in _values(value, bound, expand)]
    body = _Body(expand, written)
    result = Program(
        program.name,
        dims,
        domain,
        tuple((axis, bound.size(degree)) for axis, degree in program.mesh),
        tuple(s for s, _ in storages),
        tuple(v for v, _ in values),
        tuple(Phase(phase.name, tuple(body.expand(phase.ops, bound, ()))) for phase in program.phases),
    )
    return Unrolled(result, body.origins, [place for _, place in storages], [place for _, place in values])


class _Body:
    """Walks the operators; `origins` grows by one place for every operator that is written out."""

    def __init__(self, expand: bool, written: Written | None) -> None:
        self._expand = expand
        self._written = written
        self.origins: list[int] = []
        self._place = 0

    def expand(self, ops: Sequence[Op | Repeat], bound: Bound, around: tuple[str, ...]) -> list[Op | Repeat]:
        """`around` are the indices of the Repeats around, as text: a number where expanded, else the index's name."""
        result: list[Op | Repeat] = []
        for op in ops:
            place = self._place
            self._place += 1
            if isinstance(op, Op):
                self.origins.append(place)
                written = bound.op(op) if self._written is None else self._written.op(place, op, bound, around)
                result.append(written)
            else:
                result += self._repeat(op, bound, around, place)
        return result

    def _repeat(self, repeat: Repeat, bound: Bound, around: tuple[str, ...], place: int) -> list[Op | Repeat]:
        count = bound.size(repeat.count)
        if not (self._expand and count.is_constant):
            self.origins.append(place)
            env = {n: v for n, v in bound.env.items() if n != repeat.index}
            body = self.expand(repeat.body, self._inside(repeat, bound, env, around, repeat.index), (*around, repeat.index))
            return [Repeat(repeat.index, count, tuple(body))]
        if count.constant < 0:
            raise UsageError(f"a Repeat over {repeat.index} is executed {count.constant} times")
        first = self._place
        result: list[Op | Repeat] = []
        for number in range(count.constant):
            self._place = first
            env = {**bound.env, repeat.index: number}
            inside = self._inside(repeat, bound, env, around, str(number))
            result += self.expand(repeat.body, inside, (*around, str(number)))
        self._place = first + _length(repeat.body)
        return result

    def _inside(self, repeat: Repeat, bound: Bound, env: Mapping[str, int], around: tuple[str, ...], index: str) -> Bound:
        indices = (*around, index)
        made = {r.name for op in repeat.body if isinstance(op, Op) for r in op.results if not split(r.name)[1]}
        numbered = any(i.isdigit() for i in indices)  # nothing is expanded around: the short names stay
        return Bound(env, self._expand, {**bound.local, **(dict.fromkeys(made, indices) if numbered else {})})


def _length(ops: Sequence[Op | Repeat], bound: Bound | None = None, expand: bool = False) -> int:
    """Operators and Repeats in textual order, or with `expand` those that are left when it is written out."""
    total = 0
    for op in ops:
        if isinstance(op, Op):
            total += 1
            continue
        count = bound.size(op.count) if bound and expand else None
        inner = _length(op.body, bound, expand)
        total += max(0, count.constant) * inner if count is not None and count.is_constant else 1 + inner
    return total


def _members(name: str, bound: Bound, expand: bool) -> Iterator[tuple[str, str]]:
    """The suffixes of a family's members: (as declared, as it is now), such as ("[L]", "[0]")."""
    base, indices = split(name)
    if not any(i.is_extent for i in indices):
        yield name[len(base) :], name[len(base) :]
        return
    choices = [_choices(i, bound, expand) for i in indices]
    for chosen in itertools.product(*choices):
        yield name[len(base) :], join("", chosen)


def _choices(index: Index, bound: Bound, expand: bool) -> Sequence[str]:
    if index.size is None or not index.is_extent:
        return (index.text,)
    size = bound.size(index.size)
    if not size.is_constant:
        return ((":" if index.ranged else "") + index_text(size),) if size is not index.size else (index.text,)
    return [str(k) for k in range(size.constant)] if expand else (f":{size.constant}",)


def _follow(name: str, declared: str, member: str, bound: Bound) -> str:
    """A name inside a family's declaration: the same indices become the member's, any other stays."""
    if declared and name.endswith(declared):
        return name[: -len(declared)] + member
    return bound.storage(name)


def _storages(storage: Storage, bound: Bound, expand: bool, make: Callable[..., Storage]) -> Iterator[Storage]:
    nbytes = bound.size(storage.nbytes)
    base = split(storage.name)[0]
    owners = bound.storages((storage.of,)) if storage.of is not None and is_range(storage.of) else ()
    for number, (declared, member) in enumerate(_members(storage.name, bound, expand)):
        of = None if storage.of is None else _follow(storage.of, declared, member, bound)
        if len(owners) > 1 or (owners and not is_range(owners[0])):
            if number >= len(owners):
                raise UsageError(f"${storage.name} has more members than ${storage.of}, which it is of")
            of = owners[number]
        yield make(base + member, nbytes, storage.kind, storage.device, of, storage.live_in, storage.live_out)


def _values(value: Value, bound: Bound, expand: bool) -> Iterator[Value]:
    typed = bound.tensor(value)
    base = split(value.name)[0]
    for declared, member in _members(value.name, bound, expand):
        yield replace(typed, name=base + member, storage=_follow(value.storage, declared, member, bound))
