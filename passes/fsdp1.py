"""FSDP1, FullyShardedDataParallel: flat parameters in equal parts, `fsdp1{degree=2 param-dtype=bf16}`.

What the wrapper makes of the step of one rank as Hugging Face's accelerate sets it (torch/distributed/fsdp, torch 2.13;
docs/distributed.md has each rule with its function): layers wrapped by class, with PEFT each adapter's weight too, the rest in
the root.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program, Value
from memir.ir.size import Size
from memir.ir.unroll import has_repeats, unroll
from memir.parallel.absent import without_absent
from memir.parallel.calls import passes_of
from memir.parallel.edit import Edit
from memir.parallel.flat_groups import adapters_of, flat_groups_of
from memir.parallel.flat_params import FlatPolicy, FlatRuntime
from memir.parallel.groups import sharded_gradients, shards_of
from memir.parallel.mesh import check_axis, check_degree, check_rank
from memir.parallel.policy import FLOATS
from memir.parallel.shards import in_optimizer, shard_states
from memir.rewrite.depths import lifted
from memir.rewrite.flow import Flow

_LEAST = 5  # layers of the smallest sample that the lifted program is read off


@dataclass(frozen=True, slots=True)
class Fsdp1:
    """`degree` ranks share a flat parameter; with `replicate` groups of them (hybrid) there are degree * replicate ranks.

    strategy: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, _HYBRID_SHARD_ZERO2.
    wrap: layers, or PEFT's policy besides (Trainer uses it for its models).
    param_dtype, reduce_dtype: MixedPrecision's; the step is traced in the first, and shards are f32 then.
    reentrant: the checkpoints of the step are reentrant and around FSDP's modules, as transformers before 5 has them.
    cpu: the step runs on the CPU, where all-gathers go through a flattened buffer.
    """

    name: ClassVar[str] = "fsdp1"
    degree: int = 1
    replicate: int = 1
    strategy: Literal["full", "grad-op", "hybrid", "hybrid-grad-op"] = "full"
    wrap: Literal["layers", "peft"] = "layers"
    param_dtype: Literal["none", "bf16", "f16", "f32"] = "none"
    reduce_dtype: Literal["none", "bf16", "f16", "f32"] = "none"
    shard_dtype: Literal["default", "bf16", "f16", "f32"] = "default"
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True  # holds the CPU back, and no memory: for PyTorch's words to be understood
    use_orig_params: bool = True
    reentrant: bool = False
    cpu: bool = False
    rank: int = 0

    def run(self, program: Program) -> Program:
        """The step of one rank; unchanged for degree 1. UsageError, InconclusiveError: what cannot be done."""
        if not check_axis(program, self.name, self.degree):
            return program
        check_degree(self.name, self.replicate, "replicate")
        check_rank(self.name, self.rank, self.degree * self.replicate)
        if self.strategy.startswith("hybrid") != (self.replicate > 1):
            raise UsageError(
                "fsdp1: hybrid strategies have replicate groups", hint="fsdp1{degree=4 replicate=2 strategy=hybrid}"
            )
        outer = (("replicate", Size.of(self.replicate)),) if self.replicate > 1 else ()
        mesh = (*program.mesh, *outer, (self.name, Size.of(self.degree)))
        if has_repeats(program):
            flat = unroll(program)
            if has_repeats(flat):
                return replace(lifted(program, lambda one, _: self._flat(one), _LEAST), mesh=mesh)
            program = flat
        return replace(self._flat(program)[0], mesh=mesh)

    def _flat(self, program: Program) -> tuple[Program, list[int]]:
        edit = Edit(Flow(program))
        inner = adapters_of(edit.flow) if self.wrap == "peft" else []
        groups = flat_groups_of(edit.flow, self.degree, self.rank % self.degree, inner, aligned=self.use_orig_params)
        traced = {m.value.dtype for group in groups.values() for m in group.members if m.value.dtype in FLOATS}
        policy = self._policy(traced)
        if not self.use_orig_params:
            _check_lists(edit.flow)
        runtime = FlatRuntime(edit, groups, policy)
        runtime.run(passes_of(edit.flow, inner))
        sharded_gradients(edit, groups, kept=self.use_orig_params)
        members = [m for group in groups.values() for m in group.members]
        absent = {m.parameter for m in members if not m.chunk.shape[0].constant}
        if self.use_orig_params:
            without_absent(edit, absent)

        def dtype_of(value: Value) -> str:
            return policy.shard_dtype if policy.shard_dtype and value.dtype in FLOATS else value.dtype

        shard_states(edit, shards_of(groups, runtime.sharded, dtype_of, "gpu"))
        return edit.applied()

    def _policy(self, traced: set[str]) -> FlatPolicy:
        mixed = self.param_dtype != "none"
        if mixed and traced != {self.param_dtype}:
            types = ", ".join(sorted(traced))
            message = f"fsdp1: param-dtype={self.param_dtype} computes in that type, and the step is traced in {types}"
            raise UsageError(message, hint=f"trace it with  --dtype {self.param_dtype};  shard-dtype=f32 is that of the shards")
        shards = ("f32" if mixed else "") if self.shard_dtype == "default" else self.shard_dtype
        if shards and not mixed and traced != {shards}:
            raise UsageError(f"fsdp1: shards in {shards} need  param-dtype,  the type in which the step computes")
        return FlatPolicy(
            degree=self.degree,
            replicas=self.replicate,
            reshard=not self.strategy.endswith("grad-op"),
            shard_dtype="" if traced == {shards} else shards,
            reduce_dtype="" if self.reduce_dtype == "none" else self.reduce_dtype,
            prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
            reentrant=self.reentrant,
            kept=self.use_orig_params,
            listed=self.cpu,
        )


def _check_lists(flow: Flow) -> None:
    """The optimizer works on whole flat parameters: the same bytes only where it works on all of them at once."""
    for position, op in enumerate(flow.ops):
        if in_optimizer(flow.phase[position]) and op.results and "foreach" not in op.opcode and "_fused_" not in op.opcode:
            raise InconclusiveError(
                "an optimizer that loops over flat parameters makes other temporaries than the traced one",
                where=f"{op.opcode} {op.source}",
                hint="use-orig-params=true, or an optimizer in its foreach or fused form",
            )
