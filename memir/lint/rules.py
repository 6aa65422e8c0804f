"""The rules by code and name; docs/lint.md has a section for each. Names and codes are stable: code is silenced by them."""

from __future__ import annotations

from memir.findings.finding import Rule


def _rule(code: str, name: str, text: str) -> Rule:
    return Rule(code, name, text, f"docs/lint.md#{name}")


LOGITS = _rule("MEM101", "logits-in-fp32", "Logits of a 16-bit model are copied to 32 bits as a whole.")
OUTPUTS = _rule("MEM102", "outputs-kept", "What a step returned is still held while the next step runs.")
PROBABILITIES = _rule("MEM103", "attention-probabilities", "Attention probabilities are materialized, S*S for each head.")
TWICE = _rule("MEM104", "saved-twice", "Autograd keeps a tensor and a copy of it.")
VARIABLE = _rule("MEM105", "held-by-variable", "Only a Python variable keeps a tensor alive that nothing uses any more.")
MASK = _rule("MEM106", "mask-expanded", "A mask is materialized for every sequence of the batch.")
TABLES = _rule("MEM107", "tables-per-layer", "Every layer has its own copy of an equal buffer.")
DEAD = _rule("MEM108", "saved-and-unused", "Autograd keeps a tensor that backward never reads.")
CHECKPOINT = _rule("MEM109", "checkpoint-saves-nothing", "Activation checkpointing recomputes layers and lowers no peak.")
FOREACH = _rule("MEM110", "foreach-temporaries", "The optimizer's temporaries for all parameters at once are the peak.")
GRADIENTS = _rule("MEM111", "gradients-not-freed", "Gradients of the step before are alive during forward and backward.")
UNUSED = _rule("MEM112", "parameter-without-gradient", "A trained parameter gets no gradient in the step.")
BUFFERS = _rule("MEM113", "buffer-in-fp32", "A buffer of a 16-bit model takes 32 bits.")

RULES = (
    LOGITS,
    OUTPUTS,
    PROBABILITIES,
    TWICE,
    VARIABLE,
    MASK,
    TABLES,
    DEAD,
    CHECKPOINT,
    FOREACH,
    GRADIENTS,
    UNUSED,
    BUFFERS,
)
