"""Sizes over B and S for a step that was traced at one point, from symbolic traces of fewer layers.

A symbolic trace of a layer costs five times as much as one with numbers. So the step of enough layers to compare is traced with
numbers, which shows the operators and every lifetime, and the step of very few layers with symbols, which shows every size.
Each stretch of operators (a layer in forward, in backward, ...) is found in a symbolic step, and each of its sizes must be the
number that was seen where B and S have the asked values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memir.frontend.families import OVER_LISTS, FoldError, layers_of
from memir.frontend.layout import Layout
from memir.ir.core import Op, Program, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import Size


@dataclass(slots=True)
class _Run:
    """A stretch of operators: those of one layer in one phase, or those before, between or after the layers."""

    step: _Step
    layer: int | None
    ops: list[Op]
    place: str = ""  # "first" or "last" layer of several, "before" or "after" all layers, else empty


class _Step:
    """A flat program, its stretches, and its declarations by name without the layer's number."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.layout = program, layout
        self.storages = {s.name: s for s in program.storages}
        self.resident: dict[str, list[Storage]] = defaultdict(list)
        for storage in program.storages:
            if storage.live_in:
                self.resident[self.plain(storage.name)].append(storage)
        self.values: dict[str, list[Value]] = defaultdict(list)
        for value in program.values:
            self.values[self.plain(value.name)].append(value)
        self.layers = layers_of(program, layout)
        # storages of a layer, and those of an operator with one result a parameter: there are more in a deeper model
        self.grows = {
            s.name for s in program.storages if layout.layer(s.name) is not None or layout.layer(s.of or "") is not None
        }
        self.phases: list[list[_Run]] = []
        position = 0
        for phase in program.phases:
            ops = [op for op in phase.ops if isinstance(op, Op)]
            layers = self.layers[position : position + len(ops)]
            counted = [(op, layer) for op, layer in zip(ops, layers, strict=True) if not _only_drops(op)]
            for op, layer in counted:
                if (layer is not None and layout.layer(op.path) is not None) or op.opcode.startswith(OVER_LISTS):
                    self.grows |= {r.storage for r in op.results if not self.storages[r.storage].live_in}
            self.phases.append(self._runs([op for op, _ in counted], [layer for _, layer in counted]))
            position += len(ops)

    def _runs(self, ops: list[Op], layers: list[int | None]) -> list[_Run]:
        """The stretches of a phase; operators between two of one layer belong to it."""
        starts = [k for k, layer in enumerate(layers) if layer is not None]
        runs = [_Run(self, None, [], "before")]
        for k, op in enumerate(ops):
            layer = layers[k]
            if layer is None and runs[-1].layer is not None:
                following = next((layers[s] for s in starts if s > k), None) if starts and starts[-1] > k else None
                layer = runs[-1].layer if following == runs[-1].layer else None
            if layer != runs[-1].layer:
                runs.append(_Run(self, layer, []))
            runs[-1].ops.append(op)
        if runs[-1].layer is not None:
            runs.append(_Run(self, None, []))
        if len(runs) > 1:
            runs[-1].place = "after"
        inside = [run for run in runs if run.layer is not None]
        if len({run.layer for run in inside}) > 1:
            inside[0].place, inside[-1].place = "first", "last"
        return runs

    def plain(self, name: str) -> str:
        """A name or path with * for the layer's number."""
        return self.layout.with_layer(name, "*")

    def key(self, run: _Run) -> tuple[tuple[str, str, str], ...]:
        """What a stretch runs."""
        return tuple((op.opcode, self.plain(op.path), op.source) for op in run.ops)


def symbolize(
    concrete: Program,
    layout: Layout,
    symbolic: Sequence[tuple[Program, Layout]],
    env: Mapping[str, int],
    fixed: Mapping[str, int] | None = None,
) -> tuple[Program, bool]:
    """`concrete` (traced at `env`, flat, of `layout`) with the sizes of the symbolic programs (flat, of few layers each).

    Of several symbolic programs the first that has a stretch gives its sizes; `fixed` symbols become numbers in them. Dims and
    domain are those of the last. The second result is whether a number that does not depend on B and S depends on the depth: it
    stays as it is. FoldError where a stretch or a size is not found.
    """
    steps = [_Step(program, few) for program, few in symbolic]
    return _Symbolizer(_Step(concrete, layout), steps, env, fixed or {}).run()


class _Symbolizer:
    def __init__(self, concrete: _Step, symbolic: Sequence[_Step], env: Mapping[str, int], fixed: Mapping[str, int]) -> None:
        self.concrete, self.symbolic, self.env, self.fixed = concrete, symbolic, env, fixed
        self.compare_strides = 1 not in env.values()  # a dimension of one has any stride
        self.deep = False
        self.nbytes: dict[str, Size] = {}
        self.values: dict[str, Value] = {}
        self.scratch: dict[int, Size] = {}  # by id of the operator
        self._at: dict[Size, int | None] = {}

    def run(self) -> tuple[Program, bool]:
        """See `symbolize`."""
        program, last = self.concrete.program, self.symbolic[-1].program
        if any([p.name for p in program.phases] != [p.name for p in other.program.phases] for other in self.symbolic):
            raise FoldError("the phases change with the number of layers")
        for storage in program.storages:
            if storage.live_in:
                self.nbytes[storage.name] = self._resident(storage)
        values = tuple(self._declared(value) for value in program.values)
        self.values.update({value.name: value for value in values})
        for ours, *theirs in zip(self.concrete.phases, *(other.phases for other in self.symbolic), strict=True):
            self._phase(ours, theirs)
        phases = tuple(
            replace(phase, ops=tuple(self._op(op) for op in phase.ops if isinstance(op, Op))) for phase in program.phases
        )
        storages = tuple(replace(s, nbytes=self.nbytes[s.name]) for s in program.storages)
        return (
            replace(program, dims=last.dims, domain=last.domain, storages=storages, values=values, phases=phases),
            self.deep,
        )

    def _op(self, op: Op) -> Op:
        return replace(op, results=tuple(self.values[r.name] for r in op.results), scratch=self.scratch.get(id(op), op.scratch))

    def _here(self, size: Size) -> int | None:
        """A symbolic size at the asked point; None where it is not whole there."""
        if size not in self._at:
            try:
                self._at[size] = size.evaluate(self.env)
            except ValueError:
                self._at[size] = None
        return self._at[size]

    def _is(self, symbolic: Size, number: Size) -> bool:
        return self._here(symbolic) == number.constant

    def _resident(self, storage: Storage) -> Size:
        name = self.concrete.plain(storage.name)
        for step in self.symbolic:
            found = {s.nbytes for s in step.resident[name] if self._is(s.nbytes, storage.nbytes)}
            if len(found) == 1:
                return found.pop().substitute(self.fixed)
        for step in self.symbolic:  # what the last step left behind is named by its operator, and so by the layers before it
            left = (
                s for s in step.program.storages if s.live_in and s.kind == storage.kind and s.of is None and not s.live_out
            )
            found = {s.nbytes for s in left if not storage.live_out and self._is(s.nbytes, storage.nbytes)}
            if len(found) == 1:
                return found.pop().substitute(self.fixed)
        raise FoldError("what is alive between the steps changes with the number of layers", where=storage.name)

    def _declared(self, value: Value) -> Value:
        name = self.concrete.plain(value.name)
        for other in (other for step in self.symbolic for other in (step.values[name] or step.program.values)):
            typed = self._typed(value, other)
            if typed is not None:
                return typed
        raise FoldError("what is alive between the steps changes with the number of layers", where=value.name)

    def _typed(self, value: Value, other: Value) -> Value | None:
        """The value with the sizes of the other one; None if they are not the same at the asked point."""
        if value.dtype != other.dtype or len(value.shape) != len(other.shape) or not self._is(other.offset, value.offset):
            return None
        if not all(self._is(a, b) for a, b in zip(other.shape, value.shape, strict=True)):
            return None
        if self.compare_strides:
            extents = zip(other.strides, value.strides, value.shape, strict=True)
            if not all(self._is(a, b) or n.constant == 1 for a, b, n in extents):
                return None
        bound = self._bound
        return replace(value, shape=bound(other.shape), strides=bound(other.strides), offset=bound((other.offset,))[0])

    def _bound(self, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        return tuple(size.substitute(self.fixed) for size in sizes) if self.fixed else sizes

    def _phase(self, ours: list[_Run], theirs: list[list[_Run]]) -> None:
        by_key: dict[object, list[_Run]] = defaultdict(list)
        for run in (run for runs in theirs for run in runs):
            by_key[run.step.key(run)].append(run)
        for run in ours:
            candidates = by_key[self.concrete.key(run)]
            ends = [r for r in candidates if run.place and r.place == run.place]
            others = [r for r in candidates if not any(r is e for e in ends)]
            problem = FoldError("operators that only a deeper model has", where=run.ops[0].path if run.ops else "")
            for candidate in [*ends, *others]:
                try:
                    self._run(run, candidate, same_place=not self.fixed and any(candidate is e for e in ends))
                    break
                except FoldError as error:
                    problem = error
            else:
                raise problem

    def _run(self, ours: _Run, theirs: _Run, *, same_place: bool) -> None:
        """Takes the sizes over. At the phase's ends lifetimes must be the same too; a layer between others may have none alike
        (what the first one is given lives on in the model's own variable)."""
        nbytes: dict[str, Size] = {}
        values: dict[str, Value] = {}
        scratch: dict[int, Size] = {}
        deep = False
        for op, other in zip(ours.ops, theirs.ops, strict=True):
            where = f"{op.opcode} {op.source}"
            if self._is(other.scratch, op.scratch):
                scratch[id(op)] = other.scratch.substitute(self.fixed)
            elif op.opcode.startswith(OVER_LISTS) and op.scratch.is_constant:  # so much for each of the list's tensors
                scratch[id(op)], deep = op.scratch, True
            else:
                raise FoldError("the workspace of an operator changes with the number of layers", where=where)
            outside = self.concrete.layout.layer(op.path) is None
            if len(op.results) == len(other.results):
                for value, like in zip(op.results, other.results, strict=True):
                    typed, size = self._typed(value, like), theirs.step.storages[like.storage].nbytes
                    known = nbytes.get(value.storage, self.nbytes.get(value.storage))
                    number = self.concrete.storages[value.storage].nbytes
                    if typed is not None and (known is not None or self._is(size, number)):
                        values[value.name] = typed
                        nbytes.setdefault(value.storage, size.substitute(self.fixed) if known is None else known)
                    elif outside and _is_number(like) and size.is_constant:
                        values[value.name], deep = value, True
                        self.concrete.grows.add(value.storage)
                        theirs.step.grows.add(like.storage)
                        nbytes.setdefault(value.storage, number)
                    else:
                        raise FoldError("a size changes with the number of layers", where=where)
            elif op.opcode.startswith(OVER_LISTS) and not all(_is_number(r) for r in other.results):
                for value, typed, size in self._like_operands(op, values):
                    values[value.name] = typed
                    nbytes.setdefault(value.storage, self.nbytes.get(value.storage, size))
            elif outside and all(_is_number(r) for r in other.results):
                for value in op.results:  # one result for each parameter, or the like
                    values[value.name] = value
                    nbytes.setdefault(
                        value.storage, self.nbytes.get(value.storage, self.concrete.storages[value.storage].nbytes)
                    )
            else:
                raise FoldError("an operator's results change with the number of layers", where=where)
            if same_place:
                self._lifetimes(op, other, theirs.step, inside=not outside)
        self.nbytes.update(nbytes)
        self.values.update(values)
        self.scratch.update(scratch)
        self.deep |= deep

    def _like_operands(self, op: Op, made: Mapping[str, Value]) -> Iterator[tuple[Value, Value, Size]]:
        """Each result of an operator over lists, with its operand's sizes (over widths, where those are symbols) and its bytes.

        The k-th result has the k-th operand's shape (ATen/native/ForeachOpsKernels.cpp), or is a number (a norm).
        """
        for value, operand in zip(op.results, op.operands, strict=False):
            like, number = made.get(operand, self.values.get(operand)), self.concrete.storages[value.storage].nbytes
            if value.shape:
                size = Size.of(ITEMSIZE[value.dtype])
                for extent in like.shape if like is not None else ():
                    size = size * extent
                if like is None or len(like.shape) != len(value.shape) or not self._is(size, number):
                    raise FoldError("the tensors of a list change with the number of layers", where=f"{op.opcode} {op.source}")
                yield value, replace(value, shape=like.shape, strides=like.strides, offset=like.offset), size
            else:
                yield value, value, number

    def _lifetimes(self, op: Op, other: Op, step: _Step, inside: bool) -> None:
        """FoldError unless both free and save the same bytes; outside of the layers, those that no layer has a part of."""
        for ours, theirs in ((op.frees, other.frees), (op.saves, other.saves)):
            left = [n for n in ours if inside or n not in self.concrete.grows]
            right = [n for n in theirs if inside or n not in step.grows]
            total = sum(self.concrete.storages[n].nbytes.constant for n in left)
            if total != sum(self._here(step.storages[n].nbytes) or 0 for n in right):
                raise FoldError("what dies at an operator changes with the number of layers", where=f"{op.opcode} {op.source}")


def _only_drops(op: Op) -> bool:
    """Whether only Python lets something go there; a program without drops does not have it."""
    return op.opcode == "memir.free" and not op.frees


def _is_number(value: Value) -> bool:
    sizes: Sequence[Size] = (*value.shape, *value.strides, value.offset)
    return all(s.is_constant for s in sizes)
