"""What LLMem measured on one GPU (arXiv 2404.10933, Table 2), written down by hand, and its recipe.

One Tesla V100-16GB (16384 MiB), PyTorch 2.0.1, CUDA 11.7, transformers 4.29.2, ColossalAI Gemini: fp16 parameters and an fp32
copy in chunks, gradients in the place of the fp16 parameters, fp32 Adam states, gradient checkpointing around every layer,
sequences of 512 tokens (the paper, section 4 and 5.1; the released code, size_estimator.py and dp_real.py). Figures in MiB, of
GPUtil, which asks the driver: they have the CUDA context in them. The batch sizes are not published; the text says that the
largest was taken that fits.
"""

from __future__ import annotations

from dataclasses import dataclass

CARD = 16384  # MiB, as the paper says
SEQ = 512
MIB = 2**20
PER_PARAMETER = 12  # bytes beside the fp16 parameter: its fp32 copy, momentum and variance


@dataclass(frozen=True, slots=True)
class Fact:
    """One row. `upcast`: the model's code makes its logits fp32 (modeling_codegen.py of 4.29.2; opt and bloom do not)."""

    name: str
    preset: str
    measured: int  # MiB
    llmem: int  # what LLMem estimated, MiB
    upcast: bool = False


FACTS = (
    Fact("OPT-125m", "opt-125m", 16378, 16314),
    Fact("OPT-350m", "opt-350m", 16264, 16004),
    Fact("bloom-560m", "bloom-560m", 16324, 16578),
    Fact("codegen-350M", "codegen-350m", 16100, 16236, upcast=True),
)
