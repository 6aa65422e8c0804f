"""A process group for memory measurements on the CPU: gloo's messages between processes, NCCL's use of the allocator.

PyTorch's gloo collectives clone their arguments, and gloo's worker threads let go of tensors some time after a collective has
ended, which is neither the same on each run nor what NCCL does. Here every collective is made of gloo's sends and receives, in
the calling thread, to its end: nothing is allocated but what ProcessGroupNCCL allocates (the flattened buffer of collectives
over lists: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `newLikeFlat`), and nothing is held afterwards. Scratch is
numpy's, which PyTorch's allocator does not see.
"""

# PyTorch's stubs give these methods their overloads for users, not the one form that a subclass is called with.
# mypy: disable-error-code="override, assignment, attr-defined, call-arg, no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _create_work_from_future
from torch.futures import Future

BACKEND = "memir"
Tensors = Sequence[torch.Tensor]


def register_backend() -> None:
    """Makes `init_process_group("memir", ...)` possible; once a process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> SynchronousGroup:
    return SynchronousGroup(store, rank, size, timeout)


class SynchronousGroup(dist.ProcessGroup):
    """Collectives that have ended when they return. Arguments are those of torch.distributed.ProcessGroup."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._count = torch.tensor(float(size))  # made here: a Python number in an operator would be a tensor in the step
        self._peers = [r for r in range(size) if r != rank]

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        """The name it is registered under."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """The name that torch.distributed gave this group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        """The same; functional collectives ask for it."""
        return self.pg_name

    # -- one tensor ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Each tensor becomes the reduction of all ranks' own."""
        for tensor in tensors:
            self._reduce(tensor, [_bytes(tensor)] * self._size, _op(opts))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """As allreduce, on the root only."""
        for tensor in tensors:
            self._to_root(tensor, opts.rootRank, _op(opts))
        return _done(tensors)

    def _to_root(self, tensor: torch.Tensor, root: int, op: Any) -> None:
        if self._rank == root:
            parts = {r: _scratch(tensor) for r in self._peers}
            self._exchange({}, {r: _bytes(part) for r, part in parts.items()})
            _accumulate(tensor, [parts.get(r) for r in range(self._size)], op, self._count)
        else:
            self._exchange({root: _bytes(tensor)}, {})

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Each tensor becomes the root's."""
        for tensor in tensors:
            data = _bytes(tensor)
            if self._rank == opts.rootRank:
                self._exchange(dict.fromkeys(self._peers, data), {})
            else:
                self._exchange({}, {opts.rootRank: data})
        return _done(tensors)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """`output` becomes all ranks' inputs, one after another."""
        places = _bytes(output).chunk(self._size)
        own = _bytes(input)
        if places[self._rank].data_ptr() != own.data_ptr():
            places[self._rank].copy_(own)
        self._exchange(dict.fromkeys(self._peers, own), {r: places[r] for r in self._peers})
        return _done([output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """`output` becomes this rank's part of the reduction of all inputs."""
        parts = _bytes(input).chunk(self._size)
        if output.data_ptr() != parts[self._rank].data_ptr():
            _bytes(output).copy_(parts[self._rank])
        self._reduce(output, parts, _op(opts))
        return _done([output])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Rank r's part number i of `input` becomes rank i's part number r of `output`; sizes are along the first dimension."""
        made = output.data.split(output_sizes) if output_sizes else output.data.chunk(self._size)
        given = input.data.split(input_sizes) if input_sizes else input.data.chunk(self._size)
        return self.alltoall(list(made), list(given))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # -- lists ---------------------------------------------------------------------------------------------------

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Tensor i goes to rank i."""
        outputs[self._rank].data.copy_(inputs[self._rank])
        self._exchange({r: _bytes(inputs[r]) for r in self._peers}, {r: _bytes(outputs[r]) for r in self._peers})
        return _done(outputs)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """`outputs[i]` becomes all ranks' `inputs[i]`, by way of one flat buffer."""
        for places, own in zip(outputs, inputs, strict=True):
            flat = torch.empty((self._size, *own.shape), dtype=own.dtype)
            self.all_gather_single(flat, own)
            for place, part in zip(places, flat, strict=True):
                place.data.copy_(part)
        return _done([tensor for places in outputs for tensor in places])

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """`outputs[i]` becomes the reduction of every rank's `inputs[i][rank]`, by way of one flat buffer."""
        for output, parts in zip(outputs, inputs, strict=True):
            flat = torch.empty((self._size, *output.shape), dtype=output.dtype)
            for place, part in zip(flat, parts, strict=True):
                place.copy_(part.data)
            self.reduce_scatter_single(output, flat, opts)
        return _done(outputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """all_gather_single of each pair."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """reduce_scatter_single of each pair."""
        for output, own in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, own, opts)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """The root's `outputs[0]` become all ranks' `inputs[0]`."""
        if self._rank == opts.rootRank:
            outputs[0][self._rank].data.copy_(inputs[0])
            self._exchange({}, {r: _bytes(outputs[0][r]) for r in self._peers})
        else:
            self._exchange({opts.rootRank: _bytes(inputs[0])}, {})
        return _done(inputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        """Each rank's `outputs[0]` becomes its part of the root's `inputs[0]`."""
        if self._rank == opts.rootRank:
            outputs[0].data.copy_(inputs[0][self._rank])
            self._exchange({r: _bytes(inputs[0][r]) for r in self._peers}, {})
        else:
            self._exchange({}, {opts.rootRank: _bytes(outputs[0])})
        return _done(outputs)

    # -- between two ranks ---------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> dist.Work:
        """Gloo's own: it holds the tensors until its Work goes."""
        return self._gloo.send([_bytes(t) for t in tensors], to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        """Gloo's own: it holds the tensors until its Work goes."""
        return self._gloo.recv([_bytes(t) for t in tensors], source, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Waits for all ranks."""
        self._gloo.barrier().wait()
        return _done([])

    def _exchange(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        """Bytes to and from other ranks, to the end."""
        works = [self._gloo.send([data], rank, _TAG) for rank, data in sent.items() if data.numel()]
        works += [self._gloo.recv([data], rank, _TAG) for rank, data in received.items() if data.numel()]
        for work in works:
            work.wait()

    def _reduce(self, output: torch.Tensor, parts: Tensors, op: Any) -> None:
        """`output` (which holds this rank's own part) becomes the reduction of the parts that every rank has for this one."""
        received = {r: _scratch(output) for r in self._peers}
        self._exchange({r: parts[r] for r in self._peers}, {r: _bytes(part) for r, part in received.items()})
        _accumulate(output, [received.get(r) for r in range(self._size)], op, self._count)


_TAG = 1 << 20  # apart from the tags of a user's own messages
_INTO: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _accumulate(output: torch.Tensor, parts: Sequence[torch.Tensor | None], op: Any, count: torch.Tensor) -> None:
    """The reduction in the order of ranks, the same on each of them; None is `output`'s own part."""
    into, total = _INTO[op], output.data
    own = _scratch(total).copy_(total)
    ordered = [own if part is None else part for part in parts]
    total.copy_(ordered[0])
    for part in ordered[1:]:
        into(total, part, out=total)
    if op == dist.ReduceOp.AVG:
        torch.div(total, count, out=total)


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as uint8; NCCL takes contiguous ones only."""
    if not tensor.is_contiguous():
        raise ValueError("tensors must be contiguous")
    return tensor.data.view(-1).view(torch.uint8)


def _scratch(like: torch.Tensor) -> torch.Tensor:
    """Memory that PyTorch's allocator does not see, in the shape and type of `like`."""
    memory = np.empty(max(1, like.numel() * like.element_size()), dtype=np.uint8)
    return torch.from_numpy(memory)[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _done(result: Tensors) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(list(result))
    return _create_work_from_future(future)
