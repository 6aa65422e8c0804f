"""Gradients and step under ZeRO 3: through the bucket into one flat buffer of parts, and from it into the optimizer.

deepspeed/runtime/zero/stage3.py: `__add_grad_to_ipg_bucket`, `__avg_scatter_grads` (reduce_scatter_coalesced of
comm/coalesced_collectives.py), `partition_grads`, `step`. Bucket and flat buffer are allocated once and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.arrivals import Arrival
from memir.parallel.coming import taken
from memir.parallel.edit import Edit
from memir.parallel.flat_step import MASTER, Flat, OptimizerPhase
from memir.parallel.partitions import elements
from memir.parallel.zero_gradients import STREAM, Ready

_NORM = 8  # bytes an element: norms in fp64


class _Options(Protocol):
    @property
    def contiguous(self) -> bool: ...
    @property
    def scatter(self) -> bool: ...
    @property
    def offload_optimizer(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Sharded:
    """A trained parameter: its storage, elements, elements of a rank's part, dtype."""

    parameter: str
    numel: int
    part: int
    dtype: str


class Partitioned:
    """What stays on each rank, and the reductions in the order in which gradients come."""

    def __init__(self, edit: Edit, shards: Sequence[Sharded], degree: int, bucket_size: int, options: _Options) -> None:
        dtypes = sorted({s.dtype for s in shards})
        if len(dtypes) > 1 or dtypes[0] == MASTER:
            raise InconclusiveError(f"zero: stage 3 needs trained parameters of one 16-bit dtype, not {' and '.join(dtypes)}")
        self.edit, self.shards, self.degree, self.bucket_size, self.options = edit, shards, degree, bucket_size, options
        self.of = {s.parameter: s for s in shards}
        self.dtype = dtypes[0]
        self.device = "host" if options.offload_optimizer else "gpu"
        self.bucket: list[Ready] = []
        self.count = 0
        total = sum(s.part for s in shards)
        self.flat = self._resident("gradients", total, self.dtype, Kind.GRADIENT, self.device)
        self.buffer = self._resident("bucket", bucket_size, self.dtype, Kind.COLLECTIVE) if options.contiguous else None

    def _resident(self, what: str, numel: int, dtype: str, kind: Kind, device: str = "gpu") -> Value:
        name = f"zero.{what}"
        nbytes = Size.of(numel * ITEMSIZE[dtype])
        self.edit.declare(Storage(name, nbytes, kind, device, live_in=True, live_out=True))
        value = Value(name, dtype, elements(numel), (ONE,), ZERO, name)
        self.edit.added_values.append(value)
        return value

    def _made(self, what: str, numel: int, dtype: str, kind: Kind, device: str = "gpu") -> Value:
        self.count += 1
        name = self.edit.declare(Storage(f"zero.{what}.{self.count}", Size.of(numel * ITEMSIZE[dtype]), kind, device))
        return Value(name, dtype, elements(numel), (ONE,), ZERO, name)

    def arrive(self, position: int, arrival: Arrival, number: int) -> None:
        """The gradient of a backward phase is whole."""
        shard = self.of[arrival.parameter.name]
        storage, value = taken(self.edit, arrival, number)
        filled = sum(r.numel for r in self.bucket)
        if filled and filled + shard.numel > self.bucket_size:
            self.reduce(position)
            filled = 0
        ready = Ready(shard.parameter, shard.numel, storage, value)
        if self.buffer is not None and filled + shard.numel <= self.bucket_size:
            self.edit.after(position, Op("aten.copy_", (self.buffer.name, value), frees=(storage,)))
            ready = Ready(shard.parameter, shard.numel, None, value)
        self.bucket.append(ready)

    def reduce(self, position: int) -> None:
        """Reduce-scatter of what is in the bucket: its parts by rank in a flat copy, unless it is one tensor that divides."""
        if not self.bucket:
            return
        own = tuple(r.storage for r in self.bucket if r.storage is not None)
        sources = tuple(r.value for r in self.bucket if r.storage is not None)
        sources = sources or ((self.buffer.name,) if self.buffer is not None else ())
        in_place = self.buffer is not None and not self.options.scatter and not own
        alone = len(self.bucket) == 1 and self.bucket[0].numel % self.degree == 0
        if in_place or alone:
            self.edit.after(position, Op("c10d._reduce_scatter_base_", (*sources, self.flat.name), frees=own, stream=STREAM))
        else:
            total = sum(self.of[r.parameter].part for r in self.bucket) * self.degree
            joined = self._made("joined", total, self.dtype, Kind.COLLECTIVE)
            self.edit.after(position, Op("aten.cat", sources, (joined,)))
            self.edit.after(position, Op("c10d._reduce_scatter_base_", (joined.name,), stream=STREAM))
            self.edit.after(position, Op("aten.copy_", (self.flat.name, joined.name), frees=(joined.storage, *own)))
        self.bucket = []

    def step(self, anchor: int, phase: OptimizerPhase, sub_group_size: int) -> None:
        """Sub-group by sub-group: a flat fp32 gradient, the optimizer's operators, the new weights."""
        groups = [(members[-1], part) for members in phase.groups() for part in self._sub_groups(members, sub_group_size)]
        for shard in self.shards:
            self.edit.before(anchor, Op("aten.linalg_vector_norm", (self.flat.name,), scratch=Size.of(_NORM * shard.part)))
        for number, (stands, members) in enumerate(groups):
            numel = sum(s.part for s in members)
            name = f"zero.part{number}"
            master = self._resident(f"part{number}.master", numel, MASTER, Kind.OPTIMIZER_STATE, self.device)
            gradient = self._gradient(anchor, name, numel, many=len(members) > 1)
            step = phase.of(stands, Flat(name, numel, master, gradient, self.device))
            for storage in (*step.states, *step.temporaries):
                self.edit.declare(storage)
            self.edit.added_values += step.values
            self.edit.before(anchor, *step.ops)
            frees = () if self.options.offload_optimizer else (gradient.storage,)
            self.edit.before(anchor, Op("aten.copy_", (master.name,), frees=frees))

    def _gradient(self, anchor: int, name: str, numel: int, *, many: bool) -> Value:
        if self.options.offload_optimizer:  # it is there from step to step, on the host
            return self._resident(f"{name.removeprefix('zero.')}.gradient", numel, MASTER, Kind.GRADIENT, self.device)
        gradient = self._made("gradient", numel, MASTER, Kind.GRADIENT)
        if not many:
            self.edit.before(anchor, Op("aten._to_copy", (self.flat.name,), (gradient,)))
            return gradient
        joined = self._made("joined", numel, self.dtype, Kind.TEMPORARY)
        self.edit.before(anchor, Op("aten.cat", (self.flat.name,), (joined,)))
        self.edit.before(anchor, Op("aten._to_copy", (joined.name,), (gradient,), frees=(joined.storage,)))
        return gradient

    def _sub_groups(self, members: Sequence[str], size: int) -> list[list[Sharded]]:
        """Parameters in order until their parts have `sub_group_size` elements (`_create_fp16_sub_groups`)."""
        shards = [self.of[name] for name in members]
        if size >= sum(s.part for s in shards):
            return [shards]
        found: list[list[Sharded]] = [[]]
        for shard in shards:
            if sum(s.part for s in found[-1]) >= size:
                found.append([])
            found[-1].append(shard)
        return found
