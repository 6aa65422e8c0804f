"""LLMem's Table 3 (arXiv 2404.10933), written down by hand, its four methods and its settings.

Four Tesla V100-16GB (16384 MiB) of CloudLab, whose V100 nodes have SXM2 cards (CloudLab manual, hardware, c4130); PyTorch
2.0.1, transformers 4.29.2, ColossalAI Gemini placed on the GPU: fp16 parameters and an fp32 copy in chunks, gradients in
the place of the fp16 parameters, fp32 Adam states, checkpointing around every layer, sequences of 512 tokens. Seconds of
fine-tuning on Alpaca; None: the paper says out of memory. 4DP is the better of conventional (CDP) and advanced (ADP) data
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

CARD = 16384  # MiB
SEQ = 512
GPUS = 4
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Recipe:
    """One of LLMem's methods by name: `dp` copies of `tp` ranks each; `gathered`: bytes of a parameter that every copy holds.

    The rest of the 14 bytes of a parameter (2 fp16, 4 fp32, 8 of Adam) is divided among all ranks (section 3.4 to 3.6).
    """

    name: str
    column: str  # of Table 3
    dp: int
    tp: int
    gathered: int
    divided: int


RECIPES = (
    Recipe("llmem-cdp", "4DP", 4, 1, 14, 0),
    Recipe("llmem-adp", "4DP", 4, 1, 2, 12),
    Recipe("llmem-dptp", "2DP+2TP", 2, 2, 2, 12),
    Recipe("llmem-tp", "4TP", 1, 4, 2, 12),
)
COLUMNS = ("4DP", "2DP+2TP", "4TP")
OFFLOAD = "CPU offload"


@dataclass(frozen=True, slots=True)
class Fact:
    """One row: seconds by column. `upcast`: the model's code makes its logits fp32."""

    name: str
    preset: str
    chosen: str
    seconds: tuple[int | None, int | None, int | None]
    upcast: bool = False


FACTS = (
    Fact("OPT-1.3b", "opt-1.3b", "4DP", (688, 1616, 2186)),
    Fact("OPT-2.7b", "opt-2.7b", "4TP", (None, 8174, 6038)),
    Fact("bloom-1b1", "bloom-1b1", "4DP", (680, 1724, 2631)),
    Fact("bloom-3b", "bloom-3b", "4TP", (None, None, 14495)),
    Fact("BioGPT-Large", "biogpt-large", "4DP", (1022, 3315, 4773)),
    Fact("codegen-2B-nl", "codegen-2b", "4TP", (None, 6314, 6244), upcast=True),
    Fact("gpt_bigcode", "santacoder", "4DP", (651, 1292, 1652)),
    Fact("gpt-neo-1.3B", "gpt-neo-1.3b", "4DP", (768, 1686, 2372), upcast=True),
    Fact("llama-7b", "llama-7b", OFFLOAD, (None, None, None)),
)
