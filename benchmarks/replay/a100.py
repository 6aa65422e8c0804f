"""What was measured on one A100-80GB, written down by hand, and the step that memir is asked about.

Source: github.com/foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv at commit 876e2ed. The run:
Hugging Face Trainer (fms-hf-tuning), AdamW, gradient checkpointing, flash-attn 2, full sequences; torch 2.4.1,
transformers 4.48.1, accelerate 1.0.1, peft 0.13.2, bitsandbytes 0.43.3. Bytes: peak is torch.cuda.max_memory_allocated, steady
what is allocated after training.

Of scripts/benchmarks/scenarios.yaml and defaults.yaml: gradient checkpointing as transformers has it by default, which was
reentrant, and adapters with a dropout of 0.1.

- "none" rows: bf16 weights, no autocast.
- "accelerated-peft-bnb" rows: nf4 with quantized scales, what is not quantized in bf16, and bf16 autocast: the peak has the
  bf16 copies of the adapters that autocast keeps (2 bytes for each of their elements).
- "baseline-peft-bnb" rows (`no_peft_model`): TRL's SFTTrainer prepares the model; norms are fp32, embeddings and head bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memir.recipe import Lora, Quantize, Recipe

LORA = Lora(r=16, alpha=16, dropout=0.1, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
FULL = Recipe(loop="trainer", attention="flash-attn-2", checkpoint="full")
ADAPTED = replace(FULL, lora=LORA)
BNB = replace(ADAPTED, quantize=Quantize(double=True, keep=True), amp="bf16")
TRL = replace(BNB, quantize=Quantize(double=True, trl=True))
GPTQ = replace(ADAPTED, quantize=Quantize("gptq"), dtype="f16", amp="f16")
RECIPES = {
    "full": FULL,
    "lora": ADAPTED,
    "accelerated-peft-bnb": BNB,
    "baseline-peft-bnb": TRL,
    "accelerated-peft-autogptq": GPTQ,
    "accelerated-peft-autogptq, no groups": replace(GPTQ, quantize=Quantize("gptq", group=-1)),
}
# At S=4096 a window of 4096 hides nothing, and flash-attn 2 needs no mask for it.
NO_WINDOW = {"sliding_window": "none"}


@dataclass(frozen=True, slots=True)
class Fact:
    """One published run: bytes at B=`batch`, a rank's where there are several."""

    method: str
    model: str
    preset: str
    batch: int
    seq: int
    peak: int
    steady: int

    @property
    def case(self) -> str:
        """`Mistral-7B full B=4 S=4096`."""
        return f"{self.model} {self.method} B={self.batch} S={self.seq}"

    @property
    def sets(self) -> dict[str, str]:
        """Fields of the config that differ from the preset's."""
        return dict(NO_WINDOW) if self.preset == "mistral-7b" else {}


FACTS = (
    Fact("full", "Mistral-7B", "mistral-7b", 4, 4096, 72_434_837_504, 43_467_876_352),
    Fact("full", "Mistral-7B", "mistral-7b", 8, 4096, 72_435_230_720, 43_468_269_568),
    Fact("lora", "Mistral-7B", "mistral-7b", 4, 4096, 26_704_571_904, 14_664_493_056),
    Fact("lora", "Mistral-7B", "mistral-7b", 8, 4096, 38_742_912_512, 14_664_886_272),
    Fact("accelerated-peft-bnb", "Mistral-7B", "mistral-7b", 4, 4096, 16_373_838_336, 4_306_496_512),
    Fact("accelerated-peft-bnb", "Mistral-7B", "mistral-7b", 8, 4096, 28_412_178_944, 4_306_889_728),
    Fact("accelerated-peft-bnb", "Llama-2-70b", "llama-2-70b", 4, 4096, 68_126_381_056, 37_179_001_856),
    Fact("accelerated-peft-bnb", "Mixtral-8x7B", "mixtral-8x7b", 4, 4096, 36_731_843_072, 24_664_501_248),
    Fact("accelerated-peft-bnb", "Mixtral-8x7B", "mixtral-8x7b", 8, 4096, 48_770_183_680, 24_664_894_464),
    Fact("baseline-peft-bnb", "Mistral-7B", "mistral-7b", 4, 4096, 20_669_338_112, 4_307_028_992),
    Fact("baseline-peft-bnb", "Mistral-7B", "mistral-7b", 8, 4096, 37_002_646_016, 4_307_422_208),
    Fact("baseline-peft-bnb", "Mixtral-8x7B", "mixtral-8x7b", 4, 4096, 42_794_268_160, 24_665_033_728),
    Fact("baseline-peft-bnb", "Mixtral-8x7B", "mixtral-8x7b", 8, 4096, 60_545_920_512, 24_665_426_944),
    Fact("accelerated-peft-autogptq", "Mistral-7B", "mistral-7b", 4, 4096, 16_404_148_736, 4_336_806_912),
    Fact("accelerated-peft-autogptq", "Mistral-7B", "mistral-7b", 8, 4096, 28_442_489_344, 4_337_200_128),
    Fact("accelerated-peft-autogptq, no groups", "Mixtral-8x7B", "mixtral-8x7b", 4, 4096, 36_041_912_832, 23_974_571_008),
    Fact("accelerated-peft-autogptq, no groups", "Mixtral-8x7B", "mixtral-8x7b", 8, 4096, 48_080_253_440, 23_974_964_224),
    Fact("accelerated-peft-autogptq, no groups", "Llama-2-70b", "llama-2-70b", 4, 4096, 67_069_711_872, 36_122_332_160),
    Fact("full", "SantaCoder", "santacoder", 4, 2048, 11_267_745_280, 6_770_300_416),
    Fact("full", "SantaCoder", "santacoder", 8, 2048, 15_193_274_880, 6_769_448_448),
)
