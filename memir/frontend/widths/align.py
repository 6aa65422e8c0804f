"""Programs traced at several widths, laid beside each other operator by operator: one program over the widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from memir.frontend.widths.coefficients import Coefficients, NotGeneralError
from memir.ir.core import Op, Program, Storage, Value
from memir.ir.domain import Condition
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ONE, Size


def generalized(programs: Sequence[Program], coefficients: Coefficients, dims: Sequence[str]) -> Program:
    """The flat program over `dims` that is `programs[j]` at point j of the coefficients. NotGeneralError says what differs."""
    first = programs[0]
    same_structure(programs)
    of = _Sizes(coefficients)
    values = tuple(of.value(group) for group in zip(*(p.values for p in programs), strict=True))
    phases = []
    for group in zip(*(p.phases for p in programs), strict=True):
        columns = [[op for op in phase.ops if isinstance(op, Op)] for phase in group]
        phases.append(replace(group[0], ops=tuple(of.op(ops) for ops in zip(*columns, strict=True))))
    fills = _fills(values, phases)
    storages = tuple(of.storage(group, fills) for group in zip(*(p.storages for p in programs), strict=True))
    domain = _domain([p.domain for p in programs], of)
    return replace(first, dims=tuple(dims), domain=domain, storages=storages, values=values, phases=tuple(phases))


def same_structure(programs: Sequence[Program]) -> None:
    """NotGeneralError unless all programs run the same operators on the same storages with the same lifetimes."""
    first = programs[0]
    for other in programs[1:]:
        if [p.name for p in first.phases] != [p.name for p in other.phases]:
            raise NotGeneralError("the phases change with the widths")
        for ours, theirs in zip(first.phases, other.phases, strict=True):
            for a, b in zip(ours.ops, theirs.ops, strict=False):
                if isinstance(a, Op) and isinstance(b, Op) and _look(a) != _look(b):
                    raise NotGeneralError(f"other operators run at other widths: {a.opcode}, {b.opcode}", where=_where(b))
            if len(ours.ops) != len(theirs.ops):
                raise NotGeneralError(f"the {ours.name} has more operators at some widths than at others")
        if [_declared(s) for s in first.storages] != [_declared(s) for s in other.storages]:
            raise NotGeneralError("other storages are made at other widths")
        if [(v.name, v.dtype, len(v.shape), v.storage) for v in first.values] != [
            (v.name, v.dtype, len(v.shape), v.storage) for v in other.values
        ]:
            raise NotGeneralError("other tensors are alive between the steps at other widths")


def _look(op: Op) -> object:
    results = tuple((r.name, r.dtype, len(r.shape), r.storage) for r in op.results)
    frees, drops, saves = (tuple(sorted(names)) for names in (op.frees, op.drops, op.saves))  # their order says nothing
    return replace(op, results=(), scratch=Size(), frees=frees, drops=drops, saves=saves), results


def _declared(storage: Storage) -> Storage:
    return replace(storage, nbytes=ONE)


def _where(op: Op) -> str:
    return " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))


class _Sizes:
    def __init__(self, coefficients: Coefficients) -> None:
        self.coefficients = coefficients
        self._bound: dict[tuple[Size, int], Size | None] = {}

    def size(self, sizes: tuple[Size, ...], where: Callable[[], str]) -> Size:
        try:
            return self.coefficients.size(sizes)
        except NotGeneralError as error:
            raise NotGeneralError(error.message, where=where()) from None

    def value(self, group: tuple[Value, ...]) -> Value:
        first = group[0]

        def where() -> str:
            return f"%{first.name}"

        shape = tuple(self.size(sizes, where) for sizes in zip(*(v.shape for v in group), strict=True))
        strides = _contiguous(shape)
        if not self._is([v.strides for v in group], strides):
            strides = tuple(self.size(sizes, where) for sizes in zip(*(v.strides for v in group), strict=True))
        offset = self.size(tuple(v.offset for v in group), where)
        return replace(first, shape=shape, strides=strides, offset=offset)

    def op(self, group: tuple[Op, ...]) -> Op:
        results = tuple(self.value(values) for values in zip(*(op.results for op in group), strict=True))
        scratch = self.size(tuple(op.scratch for op in group), lambda: _where(group[0]))
        return replace(group[0], results=results, scratch=scratch)

    def storage(self, group: tuple[Storage, ...], fills: Mapping[str, Value]) -> Storage:
        """Its bytes are those of the tensor that fills it, where there is one."""
        first = group[0]
        value = fills.get(first.name)
        if value is not None:
            nbytes = Size.of(ITEMSIZE[value.dtype])
            for extent in value.shape:
                nbytes = nbytes * extent
            plain = all(isinstance(atom, str) for monomial, _ in nbytes.terms for atom, _ in monomial)
            if plain and self._is([(s.nbytes,) for s in group], (nbytes,)):
                return replace(first, nbytes=nbytes)
        return replace(first, nbytes=self.size(tuple(s.nbytes for s in group), lambda: f"${first.name}"))

    def _is(self, seen: Sequence[Sequence[Size]], sizes: Sequence[Size]) -> bool:
        """Whether the sizes are those that were seen at each point."""
        return all(
            self._at(size, number) is numbers[place] for number, numbers in enumerate(seen) for place, size in enumerate(sizes)
        )

    def _at(self, size: Size, number: int) -> Size | None:
        key = size, number
        if key not in self._bound:
            try:
                self._bound[key] = size.substitute(self.coefficients.points[number])
            except ValueError:
                self._bound[key] = None
        return self._bound[key]


def _contiguous(shape: Sequence[Size]) -> tuple[Size, ...]:
    strides, step = [], ONE
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


def _fills(values: Sequence[Value], phases: Sequence[object]) -> dict[str, Value]:
    """The first tensor in each storage: the one it was made for."""
    found: dict[str, Value] = {}
    for value in values:
        found.setdefault(value.storage, value)
    for phase in phases:
        for op in getattr(phase, "ops"):  # noqa: B009
            for value in op.results:
                found.setdefault(value.storage, value)
    return found


def _domain(domains: Sequence[tuple[str, ...]], of: _Sizes) -> tuple[str, ...]:
    """The conditions with their numbers generalized; those that only some widths have stay as the target's are."""
    found = []
    for number, text in enumerate(domains[0]):
        conditions = [Condition.read(domain[number]) for domain in domains if number < len(domain)]
        read = [c for c in conditions if c is not None]
        if len(read) < len(domains) or len({(c.sign, c.modulus) for c in read}) > 1:
            found.append(text)
            continue
        try:
            left, right = (of.size(tuple(sides), str) for sides in zip(*((c.left, c.right) for c in read), strict=True))
        except NotGeneralError:
            found.append(text)
            continue
        found.append(replace(read[0], left=left, right=right).text(("B", "S")))
    return tuple(found)
