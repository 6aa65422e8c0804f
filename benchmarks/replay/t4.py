"""What was measured on a Tesla T4 (t4.csv, written down by hand), and the step that memir is asked about.

Source: the sdist of fitcheck-llm 0.3.1 on PyPI (MIT), data/measurements/*.json; each row names file and entry. QLoRA (nf4,
scales not quantized; two rows LoRA) of r on q, k, v and o, fp16 compute, `prepare_model_for_kbit_training`, gradient
checkpointing, AdamW; torch 2.10 and 2.14, transformers 5.0 and 5.17, peft 0.19 and 0.20. All figures in MiB as published:
`peak` is torch.cuda.max_memory_allocated over the step, `reserved` max_memory_reserved; resident is what is allocated before
the steps, without the optimizer's state; then the peaks of the three phases.

How the loop holds things was read off the figures and is the same for all rows: each step's outputs live until it ends.
With sdpa the runs expand grouped keys and values themselves ("GQA expand shim"), so that the memory-efficient kernel can run.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

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
MEASURED_STEP = 2  # scripts/measure.py: one step to warm up, then the one that is measured, then one whose phases are
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


def _runs() -> tuple[Run, ...]:
    with (Path(__file__).resolve().parent / "t4.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def _run(row: dict[str, str]) -> Run:
    def figure(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    return Run(
        row["file"],
        int(row["entry"]),
        row["model"],
        int(row["batch"]),
        int(row["seq"]),
        int(row["rank"]),
        row["attention"],
        row["quantized"] == "True",
        float(row["peak"]),
        float(row["reserved"]),
        figure("resident"),
        figure("forward"),
        figure("backward"),
        figure("optimizer"),
    )


RUNS = _runs()
