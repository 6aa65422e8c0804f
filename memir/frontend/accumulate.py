"""Gradients that meet are added in place, as autograd's engine does in a real run.

Where two gradients of one tensor meet, the engine adds the later one into the earlier one if nobody else holds that one
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`); tensor subclasses, and so fake tensors, are left out of that
and get a new tensor. Nobody else held it exactly when it died with the addition: then the sum takes over its storage here.

So with the zeros that the backward of an indexing operator scatters its gradient into.
"""

from __future__ import annotations

from memir.frontend.record import Recorder, ValueRecord
from memir.ir.size import ONE

# torch/csrc/autograd/FunctionsManual.cpp: in place unless a tensor is a subclass (`areAnyTensorSubclassLike`)
_INTO_ZEROS = {
    "aten.index_put": "aten._index_put_impl_",  # index_backward
    "aten.scatter_add": "aten.scatter_add_",  # gather_backward
    "aten.scatter.src": "aten.scatter_.src",  # value_selecting_reduction_backward: topk, sort, max
}


def accumulate_in_place(recorder: Recorder) -> None:
    """Rewrites the engine's additions and scatters of a recording in place where the real engine would do so."""
    for number, event in enumerate(recorder.events):
        if event.opcode in _INTO_ZEROS and event.from_engine:
            zeros, result = recorder.values[event.operands[0]].storage, recorder.values[event.results[0]].storage
            if zeros in event.frees and recorder.storages[zeros].born is not None:
                event.opcode = _INTO_ZEROS[event.opcode]
                event.frees.remove(zeros)
                _take_over(recorder, result, zeros)
            continue
        if not _gathers(recorder, number):
            continue
        earlier, later, total = (recorder.values[i] for i in (*event.operands, event.results[0]))
        if earlier.storage not in event.frees or not _is_dense(earlier) or earlier.dtype != total.dtype:
            continue
        if earlier.storage == later.storage or recorder.storages[earlier.storage].born is None:
            continue
        if any(earlier.storage in span.storages and span.start <= number <= span.end for span in recorder.reentrant):
            continue  # it died with the function that was called with it, right after
        event.opcode = "aten.add_.Tensor"
        event.frees.remove(earlier.storage)
        _take_over(recorder, total.storage, earlier.storage)


def _gathers(recorder: Recorder, number: int) -> bool:
    """Whether the engine itself adds here: C++ adds to a gradient that another autograd node than the current one made.

    What a node's own formula adds was made by that node.
    """
    event = recorder.events[number]
    if event.opcode != "aten.add.Tensor" or not event.from_engine or len(event.operands) != 2:
        return False
    written = [w for w in recorder.writers.get(recorder.values[event.operands[0]].storage, ()) if w < number]
    maker = next((w for w in reversed(written) if event.operands[0] in recorder.events[w].results), None)
    if maker is None or not recorder.events[maker].backward or recorder.events[written[-1]].sequence == event.sequence:
        return False
    # A view holds its base (torch/csrc/autograd/variable.h, DifferentiableViewMeta): its storage has two owners.
    storage = recorder.storages[recorder.values[event.operands[0]].storage]
    return storage.born == maker or recorder.events[maker].opcode in ("aten.add_.Tensor", *_INTO_ZEROS.values())


def _take_over(recorder: Recorder, gone: int, kept: int) -> None:
    """The storage `gone` never was: what lay in it lies in `kept`, which lives as long."""
    old, new = recorder.storages[gone], recorder.storages[kept]
    recorder.writers[kept] = recorder.writers.get(kept, []) + recorder.writers.pop(gone, [])
    new.died = old.died
    for span in recorder.reentrant:
        if gone in span.storages:
            span.storages.add(kept)
    if old.kind:
        new.name, new.kind, new.of, new.device = old.name, old.kind, old.of, old.device
    for value in recorder.values:
        if value.storage == gone:
            value.storage = kept
    if old.died is not None:
        frees = recorder.events[old.died].frees
        frees[frees.index(gone)] = kept


def _is_dense(value: ValueRecord) -> bool:
    """Whether a view is non-overlapping and dense: in some order of its dimensions it is contiguous."""
    expected = ONE
    remaining = [(s, e) for s, e in zip(value.strides, value.shape, strict=True) if e is not ONE]
    while remaining:
        match = next((pair for pair in remaining if pair[0] == expected), None)
        if match is None:
            return False
        remaining.remove(match)
        expected = expected * match[1]
    return True
