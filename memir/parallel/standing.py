"""What a pipeline rank has before a step: parameters, states and buffers of its stages, inputs, and buffers to receive into.

PyTorch allocates a buffer for every micro-batch's hidden state and gradient once, before the first step
(torch/distributed/pipelining/stage.py, `_setup_forward_recv_info`, `_create_grad_recv_info`). The inputs of all micro-batches
are parts of one batch (microbatch.py, `split_args_kwargs_into_chunks`), on the first stage, the targets on the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ZERO
from memir.parallel.assembly import Assembly

RECEIVED, RECEIVED_GRADIENT = "received", "received_gradient"


def declare(assembly: Assembly, parameters: frozenset[str]) -> None:
    """Declares all of it; `parameters` are the storages of the rank's parameters."""
    flow = assembly.stages.flow
    tensors: dict[str, list[Value]] = {}
    for value in flow.program.values:
        tensors.setdefault(value.storage, []).append(value)
    reads = {n: {name for op in (*s.forward, *s.backward) for name in _read(assembly, op)} for n, s in assembly.mine.items()}
    for storage in flow.program.storages:
        own = tensors.get(storage.name, [])
        with_it = [n for n in assembly.mine if assembly.stages.has(storage, reads[n], n)]
        if storage.kind == Kind.BUFFER:
            _copies(assembly, storage, own, with_it)
        elif storage.kind == Kind.INPUT:
            if with_it:
                _batches(assembly, storage, own)
        elif (storage.of if storage.kind != Kind.PARAMETER else storage.name) in parameters and storage.live_in:
            assembly.storages[storage.name] = storage
            assembly.values += own
    for number, stage in assembly.mine.items():
        if number - 1 not in assembly.mine:
            _buffers(assembly, number, RECEIVED, stage.enters)
        if number + 1 not in assembly.mine:
            _buffers(assembly, number, RECEIVED_GRADIENT, stage.gradient)
    assembly.named |= {v.name for v in assembly.values}


def _batches(assembly: Assembly, storage: Storage, tensors: Sequence[Value]) -> None:
    """The inputs of all micro-batches: one tensor, of which each has its rows."""
    many = assembly.plan.microbatches
    batched = all(v.shape for v in tensors)
    assembly.storages[storage.name] = replace(storage, nbytes=storage.nbytes * many) if batched else storage
    assembly.values += tensors
    for value in tensors if batched else ():
        for micro in range(1, many):
            part = replace(value, name=f"micro{micro}/{value.name}", offset=product(value.shape) * micro)
            assembly.values.append(part)
            for number in assembly.mine:
                assembly.names_of(number, micro)[0][value.name] = part.name


def _copies(assembly: Assembly, storage: Storage, tensors: Sequence[Value], numbers: Sequence[int]) -> None:
    """Every stage is a copy of the model, with buffers of its own (torchtitan, `pipeline_module_split`)."""
    for turn, number in enumerate(numbers):
        name = f"stage{number}/{storage.name}" if turn else storage.name
        assembly.storages[name] = replace(storage, name=name)
        for value in tensors:
            own = f"stage{number}/{value.name}" if turn else value.name
            assembly.values.append(replace(value, name=own, storage=name))
            for micro in range(assembly.plan.microbatches) if turn else ():
                values, storages = assembly.names_of(number, micro)
                values[value.name], storages[storage.name] = own, name


def _buffers(assembly: Assembly, number: int, what: str, tensor: Sequence[Value]) -> None:
    for micro in range(assembly.plan.microbatches) if tensor else ():
        name = assembly.numbered(number, micro, what)
        nbytes = product(tensor[0].shape) * ITEMSIZE[tensor[0].dtype]
        assembly.storages[name] = Storage(name, nbytes, Kind.COLLECTIVE, live_in=True, live_out=True)
        values, storages = assembly.names_of(number, micro)
        for turn, value in enumerate(tensor):
            own = f"{name}.{turn}" if turn else name
            assembly.values.append(replace(value, name=own, storage=name, strides=contiguous(value.shape), offset=ZERO))
            values[value.name] = own
        storages[tensor[0].storage] = name


def _read(assembly: Assembly, op: Op) -> set[str]:
    known = assembly.stages.flow.storage
    return {known[o] for o in op.operands if o in known}
