"""What cards reach of their datasheets, as others measured it: matrix products, memory, attention, the way to the host.

No figure here comes from a training run: each is of one kernel alone. A card that nobody measured takes the fractions of its
generation, and `source` says so. docs/cost-model.md has the table with its reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from memir.hardware.cards import Card

_AZURE = "Azure/AI-benchmarking-guide, Azure_Results"
_MAMF = "stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS (mean of 100 runs, bf16)"
_FA2_A100 = "liangan1/GPU_travel, performance/flash-attn (A100, head size 128)"


@dataclass(frozen=True, slots=True)
class Achieved:
    """Fractions of the datasheet that kernels reach, and where each was measured.

    `product`: of the 16-bit rate, by large matrix products on warm cards. `stream`: of the memory's bandwidth, STREAM's triad.
    `flash` and `flash_causal`: of the 16-bit rate, by FlashAttention-2's forward; of causal ones the needed half counts.
    """

    product: float
    stream: float
    flash: float
    flash_causal: float
    sources: tuple[str, str, str]  # of product, stream, flash


# 256.5 of 312 TFLOP/s at 16384^3 in fp16 with random data after 10,000 warm-up runs, when the power limit holds the clock;
# 1.70 of 2.039 TB/s. 184.0 TFLOP/s without mask, 156.3 (S=4096) and 143.7 (S=1024) of the needed half with a causal one:
# both are 161 * S / (S + 128), a tile of 128 keys on the diagonal being computed in full.
_A100 = Achieved(
    256.5 / 312, 1.70 / 2.039, 184.0 / 312, 161.0 / 312, (f"{_AZURE}/ND_A100_v4", f"{_AZURE}/ND_A100_v4, triad", _FA2_A100)
)
_BY_KEY = {
    "a100-sxm4-80gb": _A100,
    # 1377 of 1555 GB/s: argonne-lcf/ALCFBeginnersGuide, BabelStream on Polaris
    "a100-sxm4-40gb": Achieved(
        _A100.product, 1377.5 / 1555, _A100.flash, _A100.flash_causal,
        (_A100.sources[0], "argonne-lcf/ALCFBeginnersGuide, BabelStream triad", _FA2_A100),
    ),
    # 252.9 of 312 TFLOP/s, 300 W
    "a100-pcie-80gb": Achieved(252.9 / 312, _A100.stream, _A100.flash, _A100.flash_causal, (_MAMF, *_A100.sources[1:])),
    # 794.5 of 989.4 TFLOP/s; 2.97 of 3.35 TB/s; flash of PyTorch 298.4 TFLOP/s at S=4096, D=128 without a mask; causal in the
    # A100's relation of the two
    "h100-sxm5-80gb": Achieved(
        794.5 / 989.4, 2.97 / 3.35, 298.4 / 989.4, 298.4 / 989.4 * 161 / 184,
        (_MAMF, f"{_AZURE}/ND_H100_v5, triad", "pytorch/benchmark pull request 2296, sdpa at D=128, S=4096"),
    ),
    # "H200 is the same" in products; 4.15 of 4.8 TB/s
    "h200": Achieved(
        794.5 / 989.4, 4.15 / 4.8, 298.4 / 989.4, 298.4 / 989.4 * 161 / 184,
        (_MAMF, f"{_AZURE}/ND_H200_v5, triad", "pytorch/benchmark pull request 2296, sdpa at D=128, S=4096"),
    ),
    "b200": Achieved(
        1745 / 2250, 4.15 / 4.8, 298.4 / 989.4, 298.4 / 989.4 * 161 / 184,
        (_MAMF, "as the H200, not measured", "as the H100, not measured"),
    ),
}  # fmt: skip
# V100: up to 83 of 125 TFLOP/s in mixed precision with cuBLAS; 846.5 of 900 GB/s.
_VOLTA = Achieved(
    83 / 125, 846.5 / 900, 0.325, 0.325,
    (
        "Markidis et al. 2018, arXiv 1803.04014, abstract",
        "BabelStream on a V100-PCIE, UoB-HPC, triad",
        "FlashAttention's first version, 25 to 40 % (arXiv 2307.08691, abstract)",
    ),
)  # fmt: skip
_BY_CAPABILITY = ((10, "b200"), (9, "h100-sxm5-80gb"), (8, "a100-sxm4-80gb"))


def achieved(card: Card) -> Achieved:
    """What the card reaches; of its generation's best known card where it was not measured itself."""
    if card.key in _BY_KEY:
        return _BY_KEY[card.key]
    for major, key in _BY_CAPABILITY:
        if card.capability[0] >= major:
            return _BY_KEY[key]
    return _VOLTA
