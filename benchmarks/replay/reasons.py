"""Why values are off, and which published rows are no cases."""

from __future__ import annotations

from benchmarks.replay.rows import Row

LOADING = "blocks that were left unsplit while the weights were loaded"
LEFT_OUT = (
    "fms-acceleration, fused kernels (`foak`): fused cross entropy, RMSNorm and RoPE of that package are not described.",
    "fms-acceleration, `baseline-peft-bnb`: its casts are not described yet.",
    "fms-acceleration, rows without a sequence length (padded to the longest of a batch), and two GPUs (FSDP).",
    "fms-acceleration, SantaCoder with adapters: the rows do not say what `c_attn` adapters fuse.",
    "nvidia-smi rows: the sum of reserved bytes and a constant, or without the allocator's figures.",
    "litgpt, torchtune, Qwen, ms-swift, LLaMA-Factory, PEFT, torchao, Liger and others: code of their own, or incomplete.",
)


def reason(row: Row) -> str:
    """A few words where the error is beyond half a percent; empty elsewhere."""
    if abs(row.error) <= 0.5:
        return ""
    if row.value == "reserved":
        return "the layout that loading leaves behind is not played"
    if row.source == "t4" and abs(row.error_of_step) <= 0.5:
        return LOADING
    if row.value == "resident":
        return LOADING
    if row.case.startswith("SantaCoder full B=8"):
        return "not explained: one more tensor of the logits' size, and 167 MiB"
    if row.case.startswith("Llama-2-70b"):
        return (
            "the peak is in a layer, where flash-attn 2 takes grouped heads as they are; sdpa has them expanded (not verified)"
        )
    return "not explained"
