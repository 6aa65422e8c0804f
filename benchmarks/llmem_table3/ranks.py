"""One rank's step under LLMem's methods: the traced step, its tensors split as ColossalAI's 1-D tensor parallelism splits them.

Hidden states and logits are whole on every rank; what lies between the matrix products of a layer is divided (Megatron-LM,
arXiv 1909.08053, section 3). Products are divided in their longest extent that is not the tokens', batches of products
(attention) in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memir.analysis.flops import Work
from memir.ir.core import Kind, Op, Program, Repeat
from memir.ir.names import split
from memir.ir.size import Size

_MADE = (Kind.ACTIVATION, Kind.TEMPORARY)


def of_rank(program: Program, tp: int, whole: frozenset[int]) -> Program:
    """The step with what is inside of a layer divided by `tp`; `whole`: last extents that are not, hidden and vocabulary."""
    if tp == 1:
        return program
    widths: dict[str, Size] = {}
    for op in _ops(program):
        for result in op.results:
            if result.shape:
                widths.setdefault(split(result.storage)[0], result.shape[-1])
    storages = []
    for storage in program.storages:
        width = widths.get(split(storage.name)[0])
        if storage.kind in _MADE and width is not None and not _is_whole(width, whole):
            storages.append(replace(storage, nbytes=_divided(storage.nbytes, tp)))
        else:
            storages.append(storage)
    return replace(program, storages=tuple(storages))


def works_of_rank(works: Sequence[Work], tp: int, whole: frozenset[int]) -> list[Work]:
    """The operators with what a rank computes and moves of them."""
    return [_part(work, tp, whole) for work in works] if tp > 1 else list(works)


def _part(work: Work, tp: int, whole: frozenset[int]) -> Work:
    if work.shape.form == "product":
        batch, *extents = work.shape.dims
        if not batch.is_constant or batch.constant > 1:
            return replace(work, shape=replace(work.shape, dims=(_divided(batch, tp), *extents)))
        fixed = [i for i, extent in enumerate(extents) if extent.is_constant]
        if not fixed:
            return work
        most = max(fixed, key=lambda i: extents[i].constant)
        extents[most] = Size.of(-(-extents[most].constant // tp))
        return replace(work, shape=replace(work.shape, dims=(batch, *extents)))
    results = work.op.results
    if results and results[0].shape and not _is_whole(results[0].shape[-1], whole):
        return replace(work, nbytes=_divided(work.nbytes, tp))
    return work


def _is_whole(width: Size, whole: frozenset[int]) -> bool:
    return width.is_constant and width.constant in whole


def _divided(size: Size, tp: int) -> Size:
    """The size over `tp` where it divides; the whole size, which is safe, where it does not."""
    if all(coefficient % tp == 0 for _, coefficient in size.terms):
        return size.exact_div(tp)
    return size


def _ops(program: Program) -> Iterator[Op]:
    def walk(ops: Sequence[Op | Repeat]) -> Iterator[Op]:
        for op in ops:
            if isinstance(op, Repeat):
                yield from walk(op.body)
            else:
                yield op

    for phase in program.phases:
        yield from walk(phase.ops)
