"""FSDP2: parameters, gradients and optimizer states in shards, `fsdp{degree=8 param-dtype=bf16 reduce-dtype=f32}`.

What `fully_shard` on every layer and then on the model makes of the step of one rank (torch/distributed/fsdp/_fully_shard,
torch 2.13; docs/distributed.md has each rule with its function): all ranks run the same program, but where rows do not divide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.size import ONE, Size
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.calls import passes_of
from memir.parallel.edit import Edit
from memir.parallel.fully_shard import Runtime
from memir.parallel.groups import groups_of, sharded_gradients, shards_of, trained_dtype
from memir.parallel.mesh import check_axis, check_copies, check_degree, check_rank
from memir.parallel.policy import Policy
from memir.parallel.shards import shard_states
from memir.rewrite.depths import lifted
from memir.rewrite.flow import Flow

_LEAST = 5  # layers of the smallest sample that the lifted program is read off


@dataclass(frozen=True, slots=True)
class Fsdp:
    """`degree` ranks share a parameter; with `replicate` groups of them (HSDP) there are degree * replicate ranks.

    reshard: reshard_after_forward; by default layers give their parameters back and the root keeps them.
    sync: gradients are reduced after each micro-batch, or after the last only, as under accelerate's no_sync.
    keep_last: the last layer stays whole from forward to backward, as in torchtitan.
    rank: whose program it is; they differ only where a parameter's rows do not divide by the degree.
    """

    name: ClassVar[str] = "fsdp"
    degree: Size = ONE
    replicate: int = 1
    reshard: str = "default"  # "true", "false", or a number of ranks
    keep_last: bool = False
    param_dtype: Literal["none", "bf16", "f16", "f32"] = "none"
    reduce_dtype: Literal["none", "bf16", "f16", "f32"] = "none"
    output_dtype: Literal["none", "bf16", "f16", "f32"] = "none"
    shard_dtype: Literal["default", "bf16", "f16", "f32"] = "default"
    offload: bool = False
    sync: Literal["each", "last"] = "each"
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    rank: int = 0

    def run(self, program: Program) -> Program:
        """The step of one rank; unchanged for degree 1. UsageError, InconclusiveError: what cannot be done."""
        if self.degree.is_constant and not check_axis(program, self.name, self.degree.constant):
            return program
        check_degree(self.name, self.replicate, "replicate")
        check_copies(program, self.name)
        if self.degree.is_constant:
            check_rank(self.name, self.rank, self.degree.constant * self.replicate)
        policy = self._policy(program)
        program = replace(program, dims=(*program.dims, *sorted(self.degree.symbols() - set(program.dims))))
        if has_repeats(program):
            flat = unroll(program)
            if has_repeats(flat):
                new = lifted(program, lambda one, _: self._flat(one, policy), _LEAST)
                return replace(new, mesh=self._mesh(program))
            program = flat
        new, _ = self._flat(program, policy)
        return replace(new, mesh=self._mesh(program))

    def _mesh(self, program: Program) -> tuple[tuple[str, Size], ...]:
        outer = (("replicate", Size.of(self.replicate)),) if self.replicate > 1 else ()
        return (*program.mesh, *outer, (self.name, self.degree))

    def _policy(self, program: Program) -> Policy:
        if self.reshard not in ("default", "true", "false") and not self.reshard.isdigit():
            raise UsageError(f"fsdp: reshard is default, true, false or a number of ranks, not {self.reshard!r}")
        fewer = int(self.reshard) if self.reshard.isdigit() else 0
        if fewer and (not self.degree.is_constant or self.degree.constant % fewer):
            raise UsageError(f"fsdp: reshard={fewer} does not divide the degree {self.degree}")  # _get_post_forward_mesh_info
        traced = trained_dtype(program)
        if self.param_dtype not in ("none", traced):
            message = f"fsdp: param-dtype={self.param_dtype} computes in that type, and the step is traced in {traced}"
            raise UsageError(message, hint=f"trace it with  --dtype {self.param_dtype};  shard-dtype=f32 is that of the shards")
        if self.output_dtype not in ("none", traced):
            raise InconclusiveError(
                f"fsdp: outputs cast from {traced} to {self.output_dtype} are another step than the traced one"
            )
        default = "f32" if self.param_dtype != "none" else traced
        shards = default if self.shard_dtype == "default" else self.shard_dtype
        if shards != traced and self.param_dtype == "none":
            raise UsageError(f"fsdp: shards in {shards} need  param-dtype={traced},  in which the step computes")
        reduced = "" if self.reduce_dtype in ("none", traced) else self.reduce_dtype
        one_rank = self.degree.is_constant and fewer == self.degree.constant
        return Policy(
            degree=self.degree,
            replicas=Size.of(self.replicate),
            reshard=self.reshard not in ("false", "1"),
            keep_last=self.keep_last,
            reshard_root=self.reshard not in ("default", "false", "1"),
            post_forward=0 if one_rank or fewer == 1 else fewer,
            shard_dtype="" if shards == traced else shards,
            is_mixed=shards != traced,
            reduce_dtype=reduced,
            offload=self.offload,
            sync_last=self.sync == "last",
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
        )

    def _flat(self, program: Program, policy: Policy) -> tuple[Program, list[int]]:
        edit = Edit(Flow(program))
        rank = self.rank % self.degree.constant if self.degree.is_constant else self.rank  # the groups are the outer axis
        groups = groups_of(edit.flow, policy.degree, rank)
        runtime = Runtime(edit, groups, policy)
        runtime.run(passes_of(edit.flow))
        sharded_gradients(edit, groups)
        device = "host" if policy.offload else "gpu"
        shard_states(edit, shards_of(groups, runtime.reduces.sharded, policy.shard_dtype_of, device))
        return edit.applied()
