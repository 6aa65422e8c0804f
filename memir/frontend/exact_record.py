"""The recorder of one rank's step: DTensors by their local parts, storages that are emptied and filled again.

FSDP frees and allocates unsharded parameters by `UntypedStorage.resize_` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
`free_storage` and `alloc_storage`), which no dispatch mode sees: that method is wrapped. An emptied storage ends with a
`memir.free`, a filled one is a new storage, made by a `memir.alloc`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard as library
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from memir.frontend.answers import Handler
from memir.frontend.origin import ModuleStack
from memir.frontend.record import Intercept, Recorder, Sizes, StorageRecord, ValueRecord
from memir.frontend.residents import Residents
from memir.ir.core import Kind
from memir.ir.dtypes import FROM_TORCH
from memir.ir.size import ONE, ZERO


class RankRecorder(Recorder):  # type: ignore[no-untyped-call]  # PyTorch leaves its modes untyped
    """Records the operators on local tensors, collectives, and resized storages."""

    def __init__(self, sizes: Sizes, modules: ModuleStack, intercept: Intercept | None = None) -> None:
        self._types: dict[int, torch.dtype] = {}  # storage._cdata -> the type of the last tensor seen in it
        super().__init__(sizes, modules, intercept)
        self.wrappers = (DTensor, AsyncCollectiveTensor)

    def see(self, tensor: torch.Tensor, event: int | None = None) -> tuple[int, bool]:
        """The index of the tensor's storage, and whether it is new."""
        self._types[tensor.untyped_storage()._cdata] = tensor.dtype
        return super().see(tensor, event)

    def _died(self, key: int, reference: object) -> None:
        self._types.pop(key, None)
        if key in self.live:
            super()._died(key, reference)
        else:  # it was empty
            del self._watch[key]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The storage has another number of bytes now."""
        key, nbytes = storage._cdata, self.sizes(storage.nbytes())
        index = self.live.get(key)
        before = self.storages[index].nbytes if index is not None else ZERO
        if nbytes == before:
            return
        if index is not None:
            del self.live[key]
            if not self.silent and before != ZERO:
                self._pseudo("memir.free", "").frees.append(index)
                self.storages[index].died = len(self.events) - 1
        if nbytes != ZERO:
            self._fill(storage, key, nbytes)

    def _fill(self, storage: torch.UntypedStorage, key: int, nbytes: Any) -> None:
        made = len(self.storages)
        self.storages.append(StorageRecord(nbytes, born=None if self.silent else len(self.events)))
        self.live[key] = made
        if key not in self._watch:
            self._watch[key] = weakref.ref(storage, partial(self._died, key))
        if self.silent:
            return
        event = self._pseudo("memir.alloc", "")
        event.backward = torch._C._current_graph_task_id() != -1
        node = self.graph.placeholder(f"filled_{made}")
        self.storages[made].name = node.name
        dtype = self._types.get(key, torch.uint8)
        shape = (self.sizes(storage.nbytes() // dtype.itemsize),)
        name = FROM_TORCH[str(dtype).removeprefix("torch.")]
        self.values.append(ValueRecord(node.name, name, shape, (ONE,), ZERO, made, node))
        value = len(self.values) - 1
        self.by_key[made, dtype, shape, (ONE,), ZERO] = value
        self.by_node[node] = value
        self.writers.setdefault(made, []).append(len(self.events) - 1)
        event.results.append(value)


class RankResidents(Residents):
    """What lives across steps, of DTensors this rank's part."""

    def _mark(self, tensor: torch.Tensor, name: str, kind: Kind, of: str | None = None, device: str = "gpu") -> None:
        super()._mark(local_part(tensor), name, kind, of, device)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@contextmanager
def resizes_seen(recorder: RankRecorder) -> Iterator[None]:
    """Within, the recorder is told of every storage that is resized."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = original(storage, nbytes)
        recorder.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def meshes_of_numbers() -> Iterator[None]:
    """Device meshes look at the ranks they are made of: their tensors are real ones, and no step's."""
    made, shown = DeviceMesh.__init__, vars(DeviceMesh)["mesh"]

    def __init__(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (it stands in for one)
        with _disable_current_modes():
            made(self, *args, **kwargs)

    def mesh(self: DeviceMesh) -> torch.Tensor:
        with _disable_current_modes():
            tensor: torch.Tensor = shown.fget(self)
            return tensor

    smaller: Any = vars(library)["_get_post_forward_mesh_info"]

    def of_fewer_ranks(*args: Any) -> Any:
        with _disable_current_modes():
            return smaller(*args)

    with (
        mock.patch.object(DeviceMesh, "__init__", __init__),
        mock.patch.object(DeviceMesh, "mesh", property(mesh)),
        mock.patch.object(library, "_get_post_forward_mesh_info", of_fewer_ranks),  # reshard_after_forward as a number
    ):
        yield


@contextmanager
def shapes_of_whole_tensors(recorder: Recorder) -> Iterator[None]:
    """DTensor runs each operator once more on fake tensors of the whole, global shape, to know the shape of the result
    (torch/distributed/tensor/_sharding_prop.py, `_propagate_tensor_meta_non_cached`): that is nothing that a rank does."""
    original = ShardingPropagator._propagate_tensor_meta_non_cached
    known: dict[Any, Any] = {}

    def propagate(self: ShardingPropagator, schema: Any) -> Any:
        if schema not in known:
            recorder.paused += 1
            try:
                known[schema] = original(self, schema)
            finally:
                recorder.paused -= 1
        return known[schema]

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate):
        yield


@contextmanager
def ranks_seen(recorder: RankRecorder) -> Iterator[None]:
    """All three: what PyTorch does for one rank is recorded, and what it only computes about ranks is not."""
    with meshes_of_numbers(), shapes_of_whole_tensors(recorder), resizes_seen(recorder):
        yield


def _as_it_is(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`wait_tensor` returns its argument (torch/csrc/distributed/c10d/Functional.cpp); for fake tensors a new one is made."""
    return args[0]


COLLECTIVE_HANDLERS: Mapping[Any, Handler] = {torch.ops._c10d_functional.wait_tensor.default: _as_it_is}
