"""Gradients under ZeRO 1 and 2: into a bucket as they come, reduced when it is full, and the rank's own part kept.

deepspeed/runtime/zero/stage_1_and_2.py, function by function: `setup_buckets`, `reduce_ipg_grads`, `average_tensor`,
`reduce_independent_p_g_buckets_and_remove_grads`, `copy_grads_in_partition`, `independent_gradient_partition_epilogue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.edit import Edit
from memir.parallel.partitions import Group, elements

STREAM = "nccl"
NORM = 8  # bytes an element: norms are taken in fp64 (deepspeed/runtime/zero/utils.py, `get_norm_dtype`)


@dataclass(frozen=True, slots=True)
class Reduction:
    """DeepSpeed's options of these names; `partition`: stage 2, gradients too; `rank`: whose step it is; `offload`: the
    optimizer is on the host, and gradients go there as they are reduced."""

    partition: bool
    bucket_size: int  # elements
    overlap: bool
    contiguous: bool
    scatter: bool
    rank: int
    offload: bool = False


@dataclass(slots=True)
class Ready:
    """A gradient when it comes: its parameter, elements, and the storage that only it holds (None: it is in the bucket)."""

    parameter: str
    numel: int
    storage: str | None
    value: str  # a value in that storage


class Gradients:
    """One backward phase after another; operators go into `edit` behind the positions that are given."""

    def __init__(self, edit: Edit, groups: Sequence[Group], options: Reduction) -> None:
        self.edit, self.groups, self.options = edit, groups, options
        self.group_of = {name: g for g in groups for name, _ in g.parameters}
        self.mine = {p.parameter for g in groups for p in g.pieces(options.rank)}
        self.kept: list[str] = []  # storages that hold the rank's gradients from this backward on
        self.values: dict[str, str] = {}  # such a storage -> a value in it
        self.buffers: list[str] = []
        self.index = 0
        self.bucket: list[Ready] = []
        self.pending: list[Ready] = []  # freed with the next reduction (overlap without contiguous buffers)
        self.held: dict[str, list[Ready]] = {}  # gradients with a storage of their own until the epilogue
        self.partition: str | None = None
        self.count = 0

    @property
    def dtype(self) -> str:
        """Of gradients, buckets and messages."""
        return self.groups[0].dtype

    def _declare(self, what: str, numel: int, kind: Kind) -> Value:
        self.count += 1
        name = self.edit.declare(Storage(f"zero.{what}.{self.count}", Size.of(numel * ITEMSIZE[self.dtype]), kind))
        return Value(name, self.dtype, elements(numel), (ONE,), ZERO, name)

    def setup(self, position: int) -> None:
        """The bucket's buffer, with overlap two; once until they are released."""
        if self.buffers or not self.options.contiguous:
            return
        made = [self._declare("bucket", self.options.bucket_size, Kind.COLLECTIVE) for _ in range(1 + self.options.overlap)]
        self.buffers = [v.storage for v in made]
        self.index = 0
        self.edit.after(position, Op("memir.alloc", results=tuple(made)))

    def arrive(self, position: int, ready: Ready) -> None:
        """A gradient that is to be reduced now."""
        if sum(r.numel for r in self.bucket) + ready.numel > self.options.bucket_size:
            self.reduce(position)
            if self.options.overlap and self.options.contiguous:
                self.index = 1 - self.index
        if self.options.contiguous and ready.numel <= self.options.bucket_size:
            buffer = self.buffers[self.index]
            self._copied(position, ready, buffer, ready.value)
            ready = replace(ready, storage=None)
        self.bucket.append(ready)

    def _copied(self, position: int, ready: Ready, into: str, source: str) -> None:
        frees = () if ready.storage is None else (ready.storage,)
        self.edit.after(position, Op("aten.copy_", (into, source), frees=frees))

    def reduce(self, position: int) -> None:
        """What is in the bucket: a flat copy where it goes to several ranks, the sum over them, and the rank's part kept."""
        if not self.bucket:
            return
        self._free(position, self.pending)
        self.pending = []
        for numel in self._flat_copies():
            flat = self._declare("reduced", numel, Kind.COLLECTIVE)
            summed = replace(flat, name=f"{flat.name}.sum")
            own = tuple(r.value for r in self.bucket if r.storage is not None)
            source = own or (self.buffers[self.index],)
            self.edit.after(position, Op("aten.cat", source, (flat,)))
            self.edit.after(position, Op("c10d.allreduce_", (flat.name,), (summed,), stream=STREAM))
            self.edit.after(position, Op("aten._foreach_copy_", (*source, summed.name), frees=(flat.storage,)))
        for ready in self.bucket:
            self._settle(position, ready)
        self.bucket = []

    def _flat_copies(self) -> list[int]:
        """Elements of the flat copies that a reduction makes; none where what is reduced lies in one piece."""
        if not self.options.contiguous:
            return [sum(r.numel for r in self.bucket)] if len(self.bucket) > 1 else []
        if not self.options.scatter:
            return []
        slices: list[tuple[int, int]] = []  # rank, elements; neighbours that go to one rank are one
        for ready in self.bucket:
            for rank, numel in self.group_of[ready.parameter].ranks_of(ready.parameter):
                if slices and slices[-1][0] == rank:
                    slices[-1] = rank, slices[-1][1] + numel
                else:
                    slices.append((rank, numel))
        flushed: list[list[int]] = [[]]
        for _, numel in slices:
            flushed[-1].append(numel)
            if sum(flushed[-1]) > self.options.bucket_size:
                flushed.append([])
        return [sum(part) for part in flushed if len(part) > 1]

    def _settle(self, position: int, ready: Ready) -> None:
        """A reduced gradient: other ranks' is forgotten (stage 2), one's own goes out of the bucket."""
        if ready.parameter in self.mine and self.options.offload:
            self._offload(position, ready)
        elif ready.parameter in self.mine and self.options.contiguous:
            if self.partition is None:
                total = sum(n for g in self.groups for name, n in g.parameters if name in self.mine)
                made = self._declare("gradients", total, Kind.GRADIENT)
                self.partition = made.storage
                self._keep(made.storage, made.name)
                self.edit.after(position, Op("memir.alloc", results=(made,)))
            source = ready.value if ready.storage is not None else self.buffers[self.index]
            self._copied(position, ready, self.partition, source)
        elif ready.parameter in self.mine:
            assert ready.storage is not None
            self._keep(ready.storage, ready.value)
        elif not self.options.partition:
            self.held.setdefault("", []).append(ready)
        elif self.options.overlap and not self.options.contiguous:
            self.pending.append(ready)
        else:
            self._free(position, [ready])

    def _offload(self, position: int, ready: Ready) -> None:
        """The rank's piece: its norm, then an fp32 copy that goes to the host (`async_inplace_copy_grad_to_fp32_buffer...`)."""
        numel = next(n for r, n in self.group_of[ready.parameter].ranks_of(ready.parameter) if r == self.options.rank)
        source = ready.value if ready.storage is not None else self.buffers[self.index]
        self.count += 1
        name = self.edit.declare(Storage(f"zero.offloaded.{self.count}", Size.of(4 * numel), Kind.TEMPORARY))
        copied = Value(name, "f32", elements(numel), (ONE,), ZERO, name)
        frees = (name,) if ready.storage is None else (name, ready.storage)
        self.edit.after(position, Op("aten.linalg_vector_norm", (source,), scratch=Size.of(NORM * numel)))
        self.edit.after(position, Op("aten._to_copy", (source,), (copied,)))
        self.edit.after(position, Op("memir.offload", (name,), frees=frees))

    def _keep(self, storage: str, value: str) -> None:
        self.kept.append(storage)
        self.values[storage] = value

    def _free(self, position: int, gradients: Sequence[Ready]) -> None:
        frees = tuple(r.storage for r in gradients if r.storage is not None)
        if frees:
            self.edit.after(position, Op("memir.free", frees=frees))

    def epilogue(self, position: int, *, boundary: bool) -> list[str]:
        """The end of a backward: what is left is reduced, buffers go. The storages that hold the rank's gradients."""
        self.reduce(position)
        self._free(position, self.pending + self.held.pop("", []))
        self.pending = []
        if boundary and not self.options.offload:
            for group in self.groups:
                padding = group.partition - sum(p.numel for p in group.pieces(self.options.rank))
                if padding:
                    made = self._declare("padding", padding, Kind.GRADIENT)
                    self._keep(made.storage, made.name)
                    self.edit.after(position, Op("memir.alloc", results=(made,)))
        if self.buffers:
            self.edit.after(position, Op("memir.free", frees=tuple(self.buffers)))
        self.buffers, self.partition = [], None
        kept, self.kept = self.kept, []
        return kept
