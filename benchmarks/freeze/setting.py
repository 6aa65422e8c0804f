"""What is trained: the model of examples/llama.py, narrow enough for a CPU, wide enough to be a decoder."""

from __future__ import annotations

from pathlib import Path

from memir.recipe import Recipe
from memir.runtime.real import RealStep

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, SEQ = 8192, 64
SIZES = {"dim": 512, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 1024, "vocab_size": VOCABULARY}
CUTS = (0, 1, 3, 5, 6)  # none, one, half, all but one, all
STEP_BATCH = 8  # of the steps whose time and memory are measured
RECIPE = Recipe(target="cpu", dtype="f32", optimizer="adamw")


def real_step() -> RealStep:
    """The step that is timed and whose memory is measured, as `memir verify` runs it."""
    sets = {name: str(value) for name, value in SIZES.items()}
    return RealStep(str(ROOT / "examples" / "llama.py"), RECIPE, STEP_BATCH, SEQ, sets | {"max_seq_len": str(SEQ)})
