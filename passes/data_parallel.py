"""Data parallelism as torch.nn.parallel.DistributedDataParallel does it, `data-parallel{degree=8}`.

Every rank has the whole model. Gradients are copied into flat buckets, which are allocated when the module is wrapped and stay:
one more copy of the gradients, resident (torch/csrc/distributed/c10d/reducer.cpp, `initialize_buckets`). A bucket's all-reduce
starts when its last gradient is there and runs beside the rest of backward; then the sums are copied back. With
gradient_as_bucket_view the gradients *are* views of the buckets from the all-reduce on, and what backward made dies in its
AccumulateGrad (`mark_variable_ready_dense`).

Which gradients share a bucket changes no bytes without a hook: a bucket is the sum of its gradients. So each parameter has its
own share, `$w.bucket`, and a program over L layers stays one. A compression hook copies a whole bucket, so there the buckets
are those of the reducer, in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Program
from memir.ir.layout import product
from memir.ir.size import ZERO
from memir.ir.unroll import extents, has_repeats, unroll
from memir.parallel.mesh import check_axis
from memir.parallel.reducer import BROADCAST, Buckets, reduced
from memir.rewrite.depths import lifted
from memir.rewrite.flow import Flow
from memir.rewrite.lift import LiftError

MIB = 2**20
_FIRST = MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
_CAP_MB = 25  # torch/nn/parallel/distributed.py, _DEFAULT_BUCKET_CAP_MB
_LEAST = 6  # layers of the smallest sample that the lifted program is read off
_DTYPES = {"fp16": "f16", "bf16": "bf16"}  # of a compression hook's copies


@dataclass(frozen=True, slots=True)
class DataParallel:
    """DistributedDataParallel's arguments by its own names and with its defaults.

    bucket_cap_mb: MiB of gradients after which a bucket is full, 25 where not given; then the first one is full after
    `first_bucket` bytes. Both matter only to `hook`: fp16 or bf16 send compressed buckets (default_hooks.py).
    no_sync: gradients of several micro-batches are reduced after the last one only, as under DDP's no_sync(); without it after
    each. static_graph and find_unused keep a map of the parameters that were used.
    """

    name: ClassVar[str] = "data-parallel"
    degree: int = 1
    bucket_cap_mb: float | None = None
    first_bucket: int = _FIRST
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    static_graph: bool = False
    find_unused: bool = False
    hook: Literal["none", "allreduce", "fp16", "bf16"] = "none"
    no_sync: bool = True

    def run(self, program: Program) -> Program:
        """One rank's step; the program itself for degree 1.

        UsageError for a degree below 1, a second data-parallel axis, and a step without gradients. InconclusiveError for
        find_unused without static_graph, and for a hook over a symbolic number of layers.
        """
        if not check_axis(program, self.name, self.degree):
            return program
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise UsageError(f"{self.name}: bucket-cap-mb={self.bucket_cap_mb:g} is no size", hint="bucket-cap-mb=25")
        if self.find_unused and not self.static_graph:
            raise InconclusiveError(
                f"{self.name}: find-unused clones what the module returns, and the program does not tell what that is",
                hint="static-graph finds unused parameters in the first step and clones nothing after it",
            )
        if not has_repeats(program):
            return self._flat(program)[0]
        flat = unroll(program)
        if not has_repeats(flat):
            return self._flat(flat)[0]
        if self.hook in _DTYPES:
            raise LiftError(
                f"{self.name}: which gradients share a compressed bucket is no formula over the number of layers",
                hint=f"give it first:  -p 'bind{{L=32}},{self.name}{{...}}'",
            )
        new = lifted(program, lambda one, _: self._flat(one), _LEAST)
        return replace(new, domain=(*new.domain, *self._one_broadcast(program)))

    def _one_broadcast(self, program: Program) -> list[str]:
        """The condition under which the buffers of one dtype are sent in one piece, as in the samples."""
        total = sum((s.nbytes * product(extents(s.name)) for s in program.storages if s.kind == Kind.BUFFER), start=ZERO)
        return [f"{total} < {BROADCAST}"] if self.broadcast_buffers and not total.is_constant else []

    def _flat(self, program: Program) -> tuple[Program, list[int]]:
        buckets = Buckets(
            view=self.gradient_as_bucket_view,
            compressed=_DTYPES.get(self.hook),
            limits=self._limits(),
            broadcast=self.broadcast_buffers,
            used=self.find_unused or self.static_graph,
            every=not self.no_sync,
        )
        return reduced(Flow(program), self.name, self.degree, buckets)

    def _limits(self) -> tuple[int, ...]:
        """Bytes after which the first, the second, ... bucket is full (`_BucketCapacityConfig.create`)."""
        if self.bucket_cap_mb is None:
            return self.first_bucket, _CAP_MB * MIB
        return (int(self.bucket_cap_mb * MIB),)
