"""What was measured, and with what: public figures, written down by hand.

Source: github.com/foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv at commit 876e2ed: the rows
of mistralai/Mistral-7B-v0.1 on one A100-80GB without fused kernels (framework config "none"). The run: Hugging Face Trainer
(fms-hf-tuning), bf16, AdamW as the Trainer has it, gradient checkpointing, flash-attn 2, packed sequences of 4096 tokens.
Peak is `torch.cuda.max_memory_allocated`, steady what is allocated after training; both in bytes.

Left out: the rows on two GPUs (FSDP) and those with fused kernels ("foak-fast-kernels"), which memir does not describe yet;
the rows of nvidia-smi, which count the CUDA context and what the allocator caches.
"""

from __future__ import annotations

from dataclasses import dataclass

RAN_WITH = "torch 2.4.1, transformers 4.48.1, accelerate 1.0.1, peft 0.13.2, flash-attn 2.7.3"
SEQ = 4096


@dataclass(frozen=True, slots=True)
class Fact:
    """One published run: `peak` and `steady` in bytes at B=`batch`, S=4096."""

    method: str  # "full" or "lora": r=16 on q_proj, k_proj, v_proj, o_proj
    batch: int
    peak: int
    steady: int


FACTS = (
    Fact("full", 4, 72_434_837_504, 43_467_876_352),
    Fact("full", 8, 72_435_230_720, 43_468_269_568),
    Fact("lora", 4, 26_704_571_904, 14_664_493_056),
    Fact("lora", 8, 38_742_912_512, 14_664_886_272),
)
