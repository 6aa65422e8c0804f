"""What was measured on a Tesla T4, written down by hand, and the step that memir is asked about.

Source: the sdist of fitcheck-llm 0.3.1 on PyPI (MIT), data/measurements/*.json; each row names file and entry. QLoRA (nf4, scales not
quantized; two rows LoRA) of r on q, k, v and o, fp16 compute, `prepare_model_for_kbit_training`, gradient checkpointing, AdamW,
torch 2.10 and 2.14, transformers 5.0 and 5.17, peft 0.19 and 0.20. All figures in MiB as published: `peak` is
torch.cuda.max_memory_allocated over the step, `reserved` max_memory_reserved; resident is what is allocated before the steps, without
the optimizer's state; then the peaks of the three phases.

How the loop holds things was read off the figures and is the same for all rows: each step's outputs live until it ends.
With sdpa the runs expand grouped keys and values themselves ("GQA expand shim"), so that the memory-efficient kernel can run.
"""

from __future__ import annotations

from dataclasses import dataclass

from memir.recipe import Lora, Quantize, Recipe


@dataclass(frozen=True, slots=True)
class Run:
    """One published run; figures in MiB, None where none was published."""

    file: str
    entry: int
    model: str
    batch: int
    seq: int
    rank: int
    attention: str
    quantized: bool
    peak: float
    reserved: float
    resident: float | None
    forward: float | None
    backward: float | None
    optimizer: float | None

    @property
    def name(self) -> str:
        """`t4-sweep-2026-09-15 #16`."""
        return f"{self.file} #{self.entry}"

    @property
    def case(self) -> str:
        """`SmolLM2-135M B=1 S=4096 eager`."""
        return f"{self.model} B={self.batch} S={self.seq} {self.attention}{'' if self.quantized else ' not quantized'}"


# model as published -> preset, fields of the config that differ
PRESETS: dict[str, tuple[str, dict[str, str]]] = {
    "Qwen2.5-7B-Instruct": ("qwen2.5-7b", {}),
    "Qwen2.5-1.5B-Instruct": ("qwen2.5-1.5b", {}),
    "Qwen2.5-Coder-1.5B-Instruct": ("qwen2.5-1.5b", {}),
    "deepseek-coder-1.3b-instruct": (
        "deepseek-coder-6.7b",
        {
            "hidden_size": "2048",
            "intermediate_size": "5504",
            "num_hidden_layers": "24",
            "num_attention_heads": "16",
            "num_key_value_heads": "16",
        },
    ),
    "Mistral-7B-Instruct-v0.3": ("mistral-7b-v0.3", {}),
    "Llama-3.2-3B-Instruct": ("llama-3.2-3b", {}),
    "Llama-3.2-1B-Instruct": ("llama-3.2-1b", {}),
    "TinyLlama-1.1B-Chat-v1.0": ("tinyllama-1.1b", {}),
    "SmolLM2-135M": ("smollm2-135m", {}),
    "SmolLM2-360M": ("smollm2-360m", {}),
    "SmolLM2-1.7B": ("smollm2-1.7b", {}),
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def recipe(run: Run) -> Recipe:
    """The run's step in memir's words."""
    return Recipe(
        gpu="7.5",
        dtype="f16",
        attention=run.attention,
        checkpoint="full",
        lora=Lora(r=run.rank, alpha=2 * run.rank, targets=TARGETS),
        quantize=Quantize() if run.quantized else None,
        keep_outputs=True,
        function=True,
    )


# fmt: off
RUNS = (
    Run("final-t4-20260921", 0, "Qwen2.5-7B-Instruct", 1, 1024, 16, "eager", True, 10584.767578125, 11746.0, 7702.4, 9410.8, 10584.8, 8496.8),
    Run("final-t4-20260921", 2, "deepseek-coder-1.3b-instruct", 1, 1024, 16, "eager", True, 1975.486328125, 2274.0, 1202.2, 1731.5, 1975.5, 1456.5),
    Run("final-t4-20260921", 4, "Mistral-7B-Instruct-v0.3", 1, 1024, 16, "sdpa", True, 6056.275390625, 6400.0, 4846.6, 5767.9, 6056.3, 5230.9),
    Run("final-t4-20260921", 6, "Qwen2.5-Coder-1.5B-Instruct", 1, 1024, 16, "eager", True, 4235.779296875, 5060.0, 1628.3, 3053.8, 4235.8, 2319.5),
    Run("final-t4-20260921", 8, "Llama-3.2-3B-Instruct", 1, 1024, 16, "eager", True, 5498.53515625, 6212.0, 3052.3, 4507.5, 5498.5, 3734.5),
    Run("final-t4-20260921", 10, "Llama-3.2-1B-Instruct", 1, 1024, 16, "sdpa", True, 3723.083984375, 4026.0, 1537.3, 2727.1, 3723.1, 2122.6),
    Run("t4-phase3-2026-09-16", 0, "Qwen2.5-1.5B-Instruct", 1, 2048, 32, "eager", True, 6850.048828125, 7584.0, 1647.4, 4486.1, 6850.0, 3010.5),
    Run("t4-phase3-2026-09-16", 2, "Qwen2.5-1.5B-Instruct", 1, 2048, 32, "sdpa", True, 6831.173828125, 7604.0, 1644.5, 4467.2, 6831.2, 3007.6),
    Run("t4-phase3-2026-09-16", 4, "SmolLM2-1.7B", 1, 2048, 32, "eager", True, 4323.005859375, 4820.0, 1296.5, 2897.7, 4323.0, 1920.7),
    Run("t4-phase3-2026-09-16", 6, "SmolLM2-1.7B", 1, 2048, 32, "sdpa", True, 3345.755859375, 3796.0, 1296.5, 2593.8, 3345.8, 1920.7),
    Run("t4-phase3-2026-09-16", 8, "TinyLlama-1.1B-Chat-v1.0", 1, 1024, 32, "eager", True, 2020.4482421875, 2356.0, 1077.1, 1632.6, 2020.4, 1371.8),
    Run("t4-phase3-2026-09-16", 10, "TinyLlama-1.1B-Chat-v1.0", 12, 1024, 32, "sdpa", True, 9371.7021484375, 11258.0, 1078.1, 6467.9, 9371.7, 2923.9),
    Run("t4-phase3-2026-09-16", 12, "TinyLlama-1.1B-Chat-v1.0", 2, 1024, 32, "sdpa", True, 2529.5849609375, 2940.0, 1076.1, 2045.6, 2529.6, 1511.8),
    Run("t4-phase3-2026-09-16", 14, "TinyLlama-1.1B-Chat-v1.0", 4, 1024, 32, "sdpa", True, 3895.6083984375, 4886.0, 1074.1, 2927.7, 3895.6, 1791.8),
    Run("t4-phase3-2026-09-16", 16, "TinyLlama-1.1B-Chat-v1.0", 8, 1024, 32, "sdpa", True, 6631.6552734375, 8038.0, 1074.1, 4695.8, 6631.7, 2355.9),
    Run("t4-qlora-2026-09-01", 0, "TinyLlama-1.1B-Chat-v1.0", 2, 512, 32, "eager", True, 1849.0, 2070.0, None, None, None, None),
    Run("t4-qlora-2026-09-01", 2, "TinyLlama-1.1B-Chat-v1.0", 2, 2048, 32, "eager", True, 6655.0, 7640.0, None, None, None, None),
    Run("t4-qlora-2026-09-01", 4, "TinyLlama-1.1B-Chat-v1.0", 2, 1024, 32, "sdpa", True, 2528.0, 2892.0, None, None, None, None),
    Run("t4-qlora-2026-09-01", 6, "SmolLM2-1.7B", 4, 1024, 32, "eager", True, 5297.0, 6932.0, None, None, None, None),
    Run("t4-qlora-2026-09-01", 8, "Qwen2.5-1.5B-Instruct", 2, 1024, 32, "eager", True, 6831.0, 7372.0, None, None, None, None),
    Run("t4-sweep-2026-09-15", 0, "Qwen2.5-1.5B-Instruct", 2, 1024, 32, "eager", True, 6838.541015625, 7548.0, 1643.9, 4474.6, 6838.5, 3007.0),
    Run("t4-sweep-2026-09-15", 2, "Qwen2.5-1.5B-Instruct", 2, 1024, 32, "sdpa", True, 6827.666015625, 7400.0, 1642.0, 4463.7, 6827.7, 3005.1),
    Run("t4-sweep-2026-09-15", 4, "SmolLM2-1.7B", 4, 1024, 32, "eager", True, 5297.271484375, 6996.0, 1296.5, 3793.3, 5297.3, 2336.7),
    Run("t4-sweep-2026-09-15", 6, "SmolLM2-1.7B", 4, 1024, 32, "eager", True, 5297.271484375, 6996.0, 1296.5, 3793.3, 5297.3, 2336.7),
    Run("t4-sweep-2026-09-15", 8, "SmolLM2-1.7B", 4, 1024, 32, "eager", False, 6536.748046875, 7734.0, 3312.2, 5784.8, 6536.7, 3936.5),
    Run("t4-sweep-2026-09-15", 10, "SmolLM2-1.7B", 4, 1024, 32, "sdpa", True, 5281.271484375, 5940.0, 1296.5, 3777.3, 5281.3, 2336.7),
    Run("t4-sweep-2026-09-15", 12, "SmolLM2-1.7B", 4, 1024, 32, "sdpa", True, 5281.271484375, 5960.0, 1296.5, 3777.3, 5281.3, 2336.7),
    Run("t4-sweep-2026-09-15", 14, "SmolLM2-1.7B", 4, 1024, 32, "sdpa", False, 6528.748046875, 7094.0, 3312.2, 5776.8, 6528.7, 3936.5),
    Run("t4-sweep-2026-09-15", 16, "SmolLM2-135M", 1, 4096, 32, "eager", True, 3679.26708984375, 5224.0, 179.3, 2114.7, 3679.3, 1038.7),
    Run("t4-sweep-2026-09-15", 18, "SmolLM2-135M", 1, 4096, 32, "sdpa", True, 3576.75146484375, 3784.0, 179.3, 2049.8, 3576.8, 1037.8),
    Run("t4-sweep-2026-09-15", 20, "SmolLM2-135M", 2, 512, 32, "eager", True, 1067.18896484375, 1192.0, 179.3, 685.5, 1067.2, 448.3),
    Run("t4-sweep-2026-09-15", 22, "SmolLM2-135M", 2, 512, 32, "sdpa", True, 1063.81396484375, 1194.0, 179.3, 682.1, 1063.8, 448.3),
    Run("t4-sweep-2026-09-15", 24, "SmolLM2-360M", 1, 4096, 32, "eager", True, 5687.154296875, 8164.0, 388.2, 2992.2, 5687.2, 1302.5),
    Run("t4-sweep-2026-09-15", 26, "SmolLM2-360M", 1, 4096, 32, "sdpa", True, 4017.841796875, 4518.0, 381.6, 2496.9, 4017.8, 1296.8),
    Run("t4-sweep-2026-09-15", 28, "TinyLlama-1.1B-Chat-v1.0", 2, 1024, 32, "eager", True, 2876.3349609375, 3666.0, 1075.6, 2102.1, 2876.3, 1511.3),
    Run("t4-sweep-2026-09-15", 30, "TinyLlama-1.1B-Chat-v1.0", 2, 1024, 32, "sdpa", True, 2531.5849609375, 2896.0, 1077.6, 2047.6, 2531.6, 1513.8),
    Run("t4-sweep-2026-09-15", 32, "TinyLlama-1.1B-Chat-v1.0", 2, 2048, 32, "eager", True, 6650.9912109375, 7840.0, 1070.1, 4077.0, 6651.0, 1788.7),
    Run("t4-sweep-2026-09-15", 34, "TinyLlama-1.1B-Chat-v1.0", 2, 2048, 32, "sdpa", True, 3895.8662109375, 4750.0, 1073.6, 2927.9, 3895.9, 1791.6),
    Run("t4-sweep-2026-09-15", 36, "TinyLlama-1.1B-Chat-v1.0", 2, 512, 32, "eager", True, 1850.3193359375, 2216.0, 1074.1, 1606.3, 1850.3, 1370.8),
    Run("t4-sweep-2026-09-15", 38, "TinyLlama-1.1B-Chat-v1.0", 2, 512, 32, "sdpa", True, 1849.3193359375, 2054.0, 1077.1, 1606.3, 1849.3, 1372.8),
)
# fmt: on
