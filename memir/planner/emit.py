"""The winner as a configuration: torchrun with PyTorch's own calls, accelerate's YAML, DeepSpeed's JSON, torchtitan's TOML.

Keys are those of accelerate 1.x (docs/source/usage_guides/fsdp.md, FSDP2), DeepSpeed 0.1x (docs/_pages/config-json.md) and
torchtitan's JobConfig (torchtitan/config/job_config.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from memir.errors import UsageError
from memir.planner.search import Evaluated

_ZERO = {"zero-1", "zero-2", "zero-3", "zero-2-offload", "zero-3-offload"}
_FSDP = {"fsdp", "fsdp-kept", "fsdp-offload"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What the configurations need beside the candidate. `options`: of the command line, as they were typed."""

    target: str
    dtype: str
    seq: int
    global_batch: int
    per_node: int
    options: str = ""

    def command(self, one: Evaluated) -> str:
        """The `memir analyze` that gives the candidate's peak."""
        candidate = one.candidate
        words = [f"memir analyze {self.target} -b {candidate.batch} -s {self.seq}", self.options]
        if candidate.accumulate > 1 and not candidate.microbatches:
            words.append(f"--accumulate {candidate.accumulate}")
        if candidate.text:
            words.append(f'--parallel "{candidate.text}"')
        return " ".join(filter(None, words))


def torchrun(one: Evaluated, setting: Setting) -> str:
    """The line that starts the ranks, and what the script calls on each."""
    degrees, candidate = one.candidate.layout.degrees, one.candidate
    nodes = -(-one.num_gpus // setting.per_node)
    each = one.num_gpus // nodes
    copies = candidate.layout.copies.key if candidate.layout.copies else ""
    _refuse("torchrun", copies, _ZERO, "deepspeed")
    if degrees.pipeline > 1 or degrees.context > 1 or degrees.expert > 1:
        raise UsageError(
            "--emit torchrun: pipelines, context and expert parallelism are more than a few calls", hint="--emit torchtitan"
        )
    lines = [
        f"# torchrun --nnodes {nodes} --nproc-per-node {each} train.py",
        f"# micro-batch {candidate.batch}, accumulation {candidate.accumulate}, sequence {setting.seq}",
        "from torch.distributed.device_mesh import init_device_mesh",
    ]
    axes = [(name, size) for name, size in (("dp", degrees.copies), ("tp", degrees.tensor)) if size > 1]
    sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    if axes:
        lines += ["", f'mesh = init_device_mesh("cuda", {sizes!r}, mesh_dim_names={names!r})']
    if degrees.tensor > 1:
        lines += ["# before the copies, with the model's own plan (Hugging Face: config.base_model_tp_plan)"]
        lines += [
            "from torch.distributed.tensor.parallel import parallelize_module",
            'parallelize_module(model, mesh["tp"], plan)',
        ]
    if candidate.checkpoint == "full":
        lines += ["model.gradient_checkpointing_enable({'use_reentrant': False})"]
    elif candidate.checkpoint == "selective":
        lines += ["# selective: torch.utils.checkpoint.create_selective_checkpoint_contexts around every layer"]
    if copies.startswith("fsdp"):
        more = {"fsdp-kept": ", reshard_after_forward=False", "fsdp-offload": ", offload_policy=CPUOffloadPolicy()"}
        after = more.get(copies, "")
        lines += [
            "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard"
            if copies == "fsdp-offload"
            else "from torch.distributed.fsdp import fully_shard",
            "for layer in layers:",
            f'    fully_shard(layer, mesh=mesh["dp"]{after})',
            f'fully_shard(model, mesh=mesh["dp"]{after})',
        ]
    elif copies == "ddp":
        lines += [
            "from torch.nn.parallel import DistributedDataParallel",
            "model = DistributedDataParallel(model, device_ids=[local_rank])",
        ]
    return "\n".join(lines) + "\n"


def accelerate(one: Evaluated, setting: Setting) -> str:
    """`accelerate launch --config_file`, for FSDP2, DDP and tensor parallelism within it."""
    degrees, candidate = one.candidate.layout.degrees, one.candidate
    copies = candidate.layout.copies.key if candidate.layout.copies else ""
    _refuse("accelerate", copies, _ZERO, "deepspeed")
    if degrees.pipeline > 1 or degrees.expert > 1:
        raise UsageError(
            "--emit accelerate: it has no pipelines and no expert parallelism in training", hint="--emit torchtitan"
        )
    nodes = -(-one.num_gpus // setting.per_node)
    kind = "FSDP" if copies.startswith("fsdp") else "MULTI_GPU" if one.num_gpus > 1 else "NO"
    lines = [
        f"# per_device_train_batch_size={candidate.batch}, gradient_accumulation_steps={candidate.accumulate}",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"mixed_precision: 'no'  # the model is loaded in {setting.dtype}",
        f"num_machines: {nodes}",
        f"num_processes: {one.num_gpus}",
    ]
    if kind == "FSDP":
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {'false' if copies == 'fsdp-kept' else 'true'}",
            f"  fsdp_activation_checkpointing: {'true' if candidate.checkpoint == 'full' else 'false'}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            f"  fsdp_offload_params: {'true' if copies == 'fsdp-offload' else 'false'}",
        ]
    if degrees.tensor > 1 or degrees.context > 1:
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_shard_size: {degrees.copies}",
            f"  parallelism_config_tp_size: {degrees.tensor}",
            f"  parallelism_config_cp_size: {degrees.context}",
        ]
    return "\n".join(lines) + "\n"


def deepspeed(one: Evaluated, setting: Setting) -> str:
    """DeepSpeed's configuration, for ZeRO and plain data parallelism (stage 0)."""
    degrees, candidate = one.candidate.layout.degrees, one.candidate
    copies = candidate.layout.copies.key if candidate.layout.copies else "ddp"
    _refuse("deepspeed", copies, _FSDP, "accelerate")
    if degrees.pipeline > 1 or degrees.context > 1 or degrees.expert > 1 or degrees.tensor > 1:
        raise UsageError("--emit deepspeed: only ZeRO by itself is written", hint="--emit torchtitan")
    stage = int(copies.split("-")[1]) if copies.startswith("zero") else 0
    zero: dict[str, object] = {"stage": stage}
    if copies.endswith("-offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": candidate.batch,
        "gradient_accumulation_steps": candidate.accumulate,
        "train_batch_size": setting.global_batch,
        "bf16": {"enabled": setting.dtype == "bf16"},
        "fp16": {"enabled": setting.dtype == "f16"},
        "zero_optimization": zero,
    }
    return json.dumps(config, indent=2) + "\n"


def torchtitan(one: Evaluated, setting: Setting) -> str:
    """torchtitan's TOML."""
    degrees, candidate = one.candidate.layout.degrees, one.candidate
    copies = candidate.layout.copies.key if candidate.layout.copies else ""
    _refuse("torchtitan", copies, _ZERO, "deepspeed")
    sharded = copies.startswith("fsdp")
    lines = [
        "[training]",
        f"local_batch_size = {candidate.batch if degrees.pipeline == 1 else candidate.batch * candidate.accumulate}",
        f"global_batch_size = {setting.global_batch}",
        f"seq_len = {setting.seq}",
        *(["enable_cpu_offload = true"] if copies == "fsdp-offload" else []),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if sharded else degrees.copies}",
        f"data_parallel_shard_degree = {degrees.copies if sharded else 1}",
        f'fsdp_reshard_after_forward = "{"never" if copies == "fsdp-kept" else "default"}"',
        f"tensor_parallel_degree = {degrees.tensor}",
        f"context_parallel_degree = {degrees.context}",
        f"pipeline_parallel_degree = {degrees.pipeline}",
        f"expert_parallel_degree = {degrees.expert}",
    ]
    if degrees.pipeline > 1:
        lines += ['pipeline_parallel_schedule = "1F1B"', f"pipeline_parallel_microbatch_size = {candidate.batch}"]
    lines += ["", "[activation_checkpoint]", f'mode = "{candidate.checkpoint}"']
    if candidate.checkpoint == "selective":
        lines += ['selective_ac_option = "op"']
    return "\n".join(lines) + "\n"


def _refuse(form: str, copies: str, others: set[str], instead: str) -> None:
    if copies in others:
        raise UsageError(f"--emit {form}: the plan is {copies}, which it does not have", hint=f"--emit {instead}")


FORMS: dict[str, Callable[[Evaluated, Setting], str]] = {
    "torchrun": torchrun,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "torchtitan": torchtitan,
}
