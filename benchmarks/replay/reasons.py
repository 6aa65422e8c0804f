"""Why values are off, and which published rows are no cases."""

from __future__ import annotations

from benchmarks.replay.rows import Row

LOADING = "which tensor was there first while the weights were loaded: the median of 33 courses is assumed"
LAYOUT = "blocks of the step itself that are left unsplit, by where the load left free ones; the optimizer's phase agrees"
ROUTING = "the last expert's backward: its share of the tokens is data, a balanced one is assumed"
LEFT_OUT = (
    "fms-acceleration, fused kernels (`foak`): fused cross entropy, RMSNorm and RoPE of that package are not described.",
    "fms-acceleration, rows without a sequence length (padded to the longest of a batch), and two GPUs (FSDP).",
    "fms-acceleration, SantaCoder with adapters (`c_attn`): peaks are within 0.2 %, between steps 30 MB of 809 are missing.",
    "nvidia-smi rows: the sum of reserved bytes and a constant, or without the allocator's figures.",
    "litgpt, torchtune, Qwen, ms-swift, LLaMA-Factory, PEFT, torchao, Liger and others: code of their own, or incomplete.",
)


def reason(row: Row) -> str:
    """A few words where the error is beyond half a percent; empty elsewhere."""
    if abs(row.error) <= 0.5:
        return ""
    if row.value == "reserved":
        return "the layout that loading leaves behind differs from run to run"
    if row.source == "t4" and abs(row.error_of_step) <= 0.5:
        return LOADING
    if row.value == "resident":
        return LOADING
    if row.case.startswith("Mixtral-8x7B baseline") and row.value == "peak":
        return ROUTING
    if row.source == "t4" and row.value == "peak" and not row.base:
        return f"{LOADING}; what was there before the step is not published"
    if row.source == "t4" and row.case.startswith("SmolLM2-135M B=2 S=512"):
        return LAYOUT
    return "not explained"
