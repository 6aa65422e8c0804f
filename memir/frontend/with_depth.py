"""Sizes that grow with the depth: the same step folded from traces of different depths, each size a line through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from memir.frontend.families import FoldError
from memir.frontend.layout import Layout
from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.size import Size

Fit = Callable[[tuple[Size, ...]], Size]


def merged(programs: Sequence[Program], layout: Layout, depth: str) -> Program:
    """The first program (folded from a trace of `layout.units` units; each other from one more) with sizes over `depth`.

    A size is the line through the first two, and must be that of the third. FoldError otherwise.
    """
    beyond = layout.num_units(depth) - layout.units

    @cache
    def fit(sizes: tuple[Size, ...]) -> Size:
        step = sizes[1] - sizes[0]
        if any(size is not sizes[0] + step * k for k, size in enumerate(sizes)):
            raise FoldError(f"a size does not grow evenly with the number of layers: {', '.join(map(str, sizes))}")
        return sizes[0] + beyond * step if step.terms else sizes[0]

    first = programs[0]
    _same("storages", [len(p.storages) for p in programs])
    _same("phases", [[phase.name for phase in p.phases] for p in programs])
    storages = tuple(
        replace(group[0], nbytes=fit(tuple(s.nbytes for s in group)))
        for group in zip(*(p.storages for p in programs), strict=True)
    )
    aligned = zip(*(p.phases for p in programs), strict=True)
    phases = tuple(replace(group[0], ops=_ops([phase.ops for phase in group], fit)) for group in aligned)
    return replace(first, storages=storages, phases=phases)


def _ops(groups: Sequence[tuple[Op | Repeat, ...]], fit: Fit) -> tuple[Op | Repeat, ...]:
    _same("operators", [len(ops) for ops in groups])
    return tuple(_op(group, fit) for group in zip(*groups, strict=True))


def _op(group: Sequence[Op | Repeat], fit: Fit) -> Op | Repeat:
    first = group[0]
    if isinstance(first, Repeat):
        bodies = [op.body for op in group if isinstance(op, Repeat)]
        _same("operators", [len(group), len(bodies)])
        return replace(first, body=_ops(bodies, fit))
    ops = [op for op in group if isinstance(op, Op)]
    _same("operators", [(op.opcode, len(op.results), len(op.operands), len(op.frees)) for op in ops])
    results = tuple(_value(values, fit) for values in zip(*(op.results for op in ops), strict=True))
    return replace(first, results=results, scratch=fit(tuple(op.scratch for op in ops)))


def _value(group: Sequence[Value], fit: Fit) -> Value:
    _same("dimensions of a tensor", [len(v.shape) for v in group])
    return replace(
        group[0],
        shape=tuple(fit(sizes) for sizes in zip(*(v.shape for v in group), strict=True)),
        strides=tuple(fit(sizes) for sizes in zip(*(v.strides for v in group), strict=True)),
        offset=fit(tuple(v.offset for v in group)),
    )


def _same(what: str, things: Sequence[object]) -> None:
    if any(thing != things[0] for thing in things):
        raise FoldError(f"the {what} change with the number of layers")
