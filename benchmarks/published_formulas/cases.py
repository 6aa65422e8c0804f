"""The published formulas, what is derived beside each, and what every difference is.

A formula is text over the symbols of `memir formula` (docs/formulas.md); s, b of the papers are S and B here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import memir
from memir.ir.size import Size
from memir.ir.sizetext import parse_size

HERE = "benchmarks/published_formulas"
MEGATRON = f"{HERE}/megatron.py"
STATISTICS = "mean and reciprocal deviation of the two layer norms, in fp32; the paper leaves them out as small (section 4.1)"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
LLMEM = "Kim et al. 2024 (LLMem), arXiv 2404.10933, single GPU"


@dataclass(frozen=True, slots=True)
class Case:
    """One formula. `replaced` are symbols of the derived one written over those of the published one, in order."""

    name: str
    source: str
    published: str
    target: str
    of: str
    symbols: str
    recipe: memir.Recipe = field(default_factory=memir.Recipe)
    sets: tuple[tuple[str, object], ...] = ()
    elements: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    by_depth: bool = False  # only what grows with the number of layers is compared
    differences: tuple[tuple[str, str], ...] = ()  # a term of derived - published, and what it is
    note: str = ""
    parallel: str = ""  # passes of distributed methods, as `--parallel` takes them, over the step and its widths

    def expected(self) -> Size:
        """Derived less published, as it is accounted for."""
        return sum((parse_size(text) for text, _ in self.differences), start=Size())


F16 = memir.Recipe(dtype="f16")
MIXED = memir.Recipe(dtype="f32", amp="f16")
CHECKPOINTED = memir.Recipe(dtype="f16", checkpoint="full")

CASES = (
    Case(
        name="activations of a layer",
        source=f"{KORTHIKANTI}, equation 1",
        published="34*B*S*h + 5*B*S^2*a",
        target=MEGATRON,
        of="layer",
        symbols="B,S,h,f,a",
        recipe=F16,
        replaced=(("f", "4*h"),),
        differences=(("16*B*S", STATISTICS),),
    ),
    Case(
        name="activations of a layer, selective recomputation",
        source=f"{KORTHIKANTI}, equation 5 with t = 1",
        published="34*B*S*h",
        target=MEGATRON,
        of="layer",
        symbols="B,S,h,f,a",
        recipe=F16,
        sets=(("recompute", "core"),),
        replaced=(("f", "4*h"),),
        differences=(("16*B*S", STATISTICS),),
    ),
    Case(
        name="activations of a layer, tensor parallel",
        source=f"{KORTHIKANTI}, equation 2",
        published="10*B*S*h + 24*B*S*h*t^-1 + 5*B*S^2*a*t^-1",
        target=MEGATRON,
        of="layer",
        symbols="B,S,h,f,a,d",
        recipe=F16,
        replaced=(("f", "4*h*t^-1"), ("a", "a*t^-1"), ("d", "h*a^-1")),
        differences=(("16*B*S", STATISTICS),),
        note="The layer of one of t ranks: a/t heads and 4h/t inner columns, written by hand; the collectives keep nothing.",
    ),
    Case(
        name="activations of a layer, tensor and sequence parallel",
        source=f"{KORTHIKANTI}, equation 4",
        published="34*B*S*h*t^-1 + 5*B*S^2*a*t^-1",
        target=MEGATRON,
        of="layer",
        symbols="B,S,h,f,a,d,t",
        recipe=F16,
        sets=(("tensor_parallel", 2),),
        replaced=(("S", "S*t^-1"), ("f", "4*h*t^-1"), ("a", "a*t^-1"), ("d", "h*a^-1")),
        differences=(("16*B*S*t^-1", STATISTICS),),
        note=(
            "S of the layer that is traced is the rank's share, S/t. All-gather and reduce-scatter are written by hand: one "
            "repeats the share t times, the other keeps the first share."
        ),
    ),
    Case(
        name="activations of a layer, tensor parallel by the pass",
        source=f"{KORTHIKANTI}, equation 2",
        published="10*B*S*h + 24*B*S*h*t^-1 + 5*B*S^2*a*t^-1",
        target=MEGATRON,
        of="layer",
        symbols="B,S,h,f,a,t",
        recipe=F16,
        parallel="tensor-parallel{degree=t}",
        replaced=(("f", "4*h"),),
        differences=(("16*B*S", STATISTICS),),
        note=(
            "The layer of one GPU, made that of one of t ranks by memir's pass: which products are split how is derived from "
            "the graph, and t stays a symbol. PyTorch's parallelize_module keeps what Megatron keeps."
        ),
    ),
    Case(
        name="activations of a layer, tensor and sequence parallel by the pass",
        source=f"{KORTHIKANTI}, equation 4",
        published="34*B*S*h*t^-1 + 5*B*S^2*a*t^-1",
        target=MEGATRON,
        of="layer",
        symbols="B,S,h,f,a,t",
        recipe=F16,
        parallel="tensor-parallel{degree=t sequence}",
        replaced=(("f", "4*h"),),
        differences=(
            ("16*B*S*t^-1", STATISTICS),
            (
                "4*B*S*h - 4*B*S*h*t^-1",
                "PyTorch saves the inputs of qkv and up as they were gathered, 2*B*S*h each; Megatron saves the rank's share "
                "of them and gathers it once more in the backward (section 4.2.2)",
            ),
        ),
        note="The same with norms, dropout and residuals on a part of the sequence.",
    ),
    Case(
        name="states of mixed-precision Adam, 16 bytes a parameter",
        source="Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 3.1",
        published="192*L*h^2 + 208*L*h + 16*h*V + 16*h*P + 32*h",
        target="gpt2",
        of="states",
        symbols="B,S,L,h,V,a,P",
        recipe=MIXED,
        note=(
            "16 times the parameters of GPT-2. torch.autocast holds parameters and gradients in fp32, 4 + 4 bytes, and Adam's "
            "two moments, 4 + 4; the paper 2 + 2 bytes in fp16 beside an fp32 copy of the parameters. The sum is the same."
        ),
    ),
    Case(
        name="states of Adam in bf16, 8 bytes a parameter",
        source="no master copy: parameters, gradients and both moments in the parameters' own type (torch.optim.AdamW)",
        published="96*L*h^2 + 104*L*h + 8*h*V + 8*h*P + 16*h",
        target="gpt2",
        of="states",
        symbols="B,S,L,h,V,a,P",
    ),
    Case(
        name="parameters of GPT-2",
        source="Radford et al. 2019 by count: 12 h^2 + 13 h a layer, (V + S_max) h embeddings, the last norm",
        published="12*L*h^2 + 13*L*h + V*h + P*h + 2*h",
        target="gpt2",
        of="parameters",
        symbols="B,S,L,h,V,a,P",
        elements=True,
    ),
    Case(
        name="parameters of Llama 3",
        source="Dubey et al. 2024 by count: q and o h^2, k and v h^2 k/a, three h f, two norms h; embedding and head V h",
        published="2*L*h^2 + 2*L*h^2*k*a^-1 + 3*L*h*f + 2*L*h + 2*V*h + h",
        target="llama-3.1-8b",
        of="parameters",
        symbols="B,S,L,h,f,V,a,k",
        elements=True,
    ),
    Case(
        name="one boundary tensor a layer (checkpointing)",
        source=f"{LLMEM}: m_out = (e_n + l_n) bs sl o_n 2, the part of the layers",
        published="2*B*S*L*h",
        target="opt-1.3b",
        of="activations",
        symbols="B,S,L,h,f,V,a,P",
        recipe=CHECKPOINTED,
        by_depth=True,
    ),
    Case(
        name="three tensors of logits",
        source=f"{LLMEM}: m_lm = bs sl V 4 + 2 bs (sl - 1) V 4, logits in fp32",
        published="12*B*S*V - 8*B*V",
        target="opt-1.3b",
        of="logits",
        symbols="B,S,L,h,f,V,a,P",
        recipe=CHECKPOINTED,
        differences=(
            (
                "8*B*V",
                "transformers 5 pads the labels and keeps all S logits; when the paper was written the last was cut off before "
                "the loss",
            ),
        ),
    ),
)

LEFT_OUT = (
    (f"{LLMEM}: ADP, m_dp = m_base + m_p16 + (m_p32 + m_os)/gpu_n + m_out + m_lm", "benchmarks/llmem_table3 has its terms"),
)
