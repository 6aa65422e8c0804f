"""Published training speeds, written down by hand: tokens per second and GPU.

A100: github.com/foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv at 876e2ed, the rows without an
acceleration plug-in. Hugging Face Trainer (torch 2.4.1, transformers 4.48.1), bf16, AdamW, gradient checkpointing,
flash-attn 2; on two GPUs FSDP1 with FULL_SHARD and BACKWARD_PRE (scripts/benchmarks/accelerate.yaml). Samples per second of the
whole run times the sequence length, over the GPUs.

H100: github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76c6. FSDP2, fp32 parameters computed
in bf16, gradients reduced in fp32. H100 of 96 GB with HBM2e at 2.4 TB/s and a limit of 500 W in place of 700; 8 in a node with
NVLink, a port of 400 Gbit/s for each. The rows with context parallelism ran with torch.compile and float8: they are
predicted as eager bf16, and only their order is judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.replay import a100
from memir.recipe import Recipe

A100, H100 = "a100-sxm4-80gb", "h100-sxm5-96gb"
H100_POWER, H100_BANDWIDTH = 500 / 700, 2.4e12


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `seq`: tokens of a sequence over all ranks of context parallelism; `judged`: by its value too."""

    model: str
    preset: str
    recipe: Recipe
    passes: str  # text of a pipeline
    gpu: str
    num_gpus: int
    batch: int
    seq: int
    measured: float
    trained: bool = True  # all parameters, not adapters only
    context: int = 1  # degree of context parallelism
    judged: bool = True

    @property
    def name(self) -> str:
        """`Mistral-7B full, 2 x a100-sxm4-80gb, B=4 S=4096`."""
        cp = f" CP {self.context}" if self.context > 1 or not self.judged else ""
        return f"{self.model}{cp}, {self.num_gpus} x {self.gpu}, B={self.batch} S={self.seq}"

    @property
    def sets(self) -> dict[str, str]:
        """Fields of the model's config that are not the preset's."""
        return dict(a100.NO_WINDOW) if self.preset == "mistral-7b" else {}


def _hf(
    model: str, preset: str, recipe: Recipe, seq: int, rows: tuple[tuple[int, int, float], ...], trained: bool
) -> list[Case]:
    return [
        Case(model, preset, recipe, "", A100, gpus, batch, seq, measured, trained=trained) for gpus, batch, measured in rows
    ]


_TITAN = Recipe(attention="flash", clip=1.0)
_LONG = replace(_TITAN, checkpoint="full")
_SELECTIVE = "activation-checkpoint{policy=selective}"

CASES = (
    *_hf("SantaCoder full", "santacoder", a100.FULL, 2048,
         ((1, 4, 17188.9), (2, 2, 13132.8), (1, 8, 18411.5), (2, 4, 15952.9)), True),
    *_hf("Mistral-7B full", "mistral-7b", a100.FULL, 4096,
         ((1, 4, 3063.8), (2, 2, 2777.1), (1, 8, 3141.6), (2, 4, 3008.5)), True),
    *_hf("Mistral-7B LoRA", "mistral-7b", a100.ADAPTED, 4096,
         ((1, 4, 3326.0), (2, 2, 2947.1), (1, 8, 3354.6), (2, 4, 3168.3)), False),
    *_hf("Mixtral-8x7B LoRA", "mixtral-8x7b", a100.ADAPTED, 4096, ((2, 2, 1570.8), (2, 4, 1835.0)), False),
    Case("Llama-3.1-8B", "llama-3.1-8b", _TITAN, _SELECTIVE, H100, 8, 2, 8192, 5762),
    Case("Llama-3.1-8B", "llama-3.1-8b", _TITAN, _SELECTIVE, H100, 128, 2, 8192, 5605),
    Case("Llama-3.1-8B", "llama-3.1-8b", _LONG, "", H100, 8, 1, 32768, 3890, judged=False),
    Case("Llama-3.1-8B", "llama-3.1-8b", _LONG, "", H100, 8, 1, 65536, 2540, context=2, judged=False),
    Case("Llama-3.1-8B", "llama-3.1-8b", _LONG, "", H100, 8, 1, 131072, 1071, context=4, judged=False),
    Case("Llama-3.1-8B", "llama-3.1-8b", _LONG, "", H100, 8, 1, 262144, 548, context=8, judged=False),
)  # fmt: skip
