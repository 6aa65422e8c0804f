"""The rows: which loop of which method is traced, what it predicts at which batch, and the terms that a GPU adds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import memir
from benchmarks.mistral.facts import FACTS, SEQ, Fact
from benchmarks.mistral.terms import Term, attention_mask, cublas_workspaces, no_mask, unsplit_blocks
from memir.analysis.inventory import alive_at, round_size, rounded_peak
from memir.analysis.liveness import timeline
from memir.analysis.peak import START
from memir.frontend.trace import Traced
from memir.recipe import Lora, Recipe

PRESET = "mistral-7b"
# At S=4096 a window of 4096 hides nothing. flash-attn 2, as it was run, needs no mask for it; with sdpa transformers 4.48
# builds one from S=4096 on (_ignore_causal_mask_sdpa). Without a window sdpa takes its flash kernel, with the same tensors.
NO_WINDOW = {"sliding_window": "none"}
CLIP = 1.0  # TrainingArguments.max_grad_norm
FULL = Recipe(checkpoint="full", clip=CLIP)
LORA = Recipe(checkpoint="full", clip=CLIP, lora=Lora(r=16, targets=("q_proj", "k_proj", "v_proj", "o_proj")))


@dataclass(frozen=True, slots=True)
class Loop:
    """One way to describe a published method to memir."""

    method: str
    name: str
    recipe: Recipe
    window: bool = False  # the preset as it is
    fp32_outputs: bool = False  # the Trainer's conversion of outputs


LOOPS = (
    Loop("full", "plain", FULL),
    Loop("lora", "plain", LORA),
    Loop("lora", "outputs to float32", LORA, fp32_outputs=True),
    Loop("lora", "sliding window, so a 4-D mask", LORA, window=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A prediction beside its fact; bytes. `terms` are what the trace leaves to the GPU, `steady_terms` those between steps."""

    loop: Loop
    fact: Fact
    parameters: int
    peak: int  # allocated: each storage rounded to 512 bytes
    steady: int
    place: str  # "phase operator file:line" of the peak
    terms: tuple[Term, ...]
    steady_terms: tuple[Term, ...]

    @property
    def bytes_a_parameter(self) -> float:
        """The predicted peak by the number of parameters, without the terms."""
        return self.peak / self.parameters

    def residue(self) -> int:
        """Of the peak, what no term explains: predicted with terms, less measured."""
        return self.peak + sum(term.nbytes for term in self.terms) - self.fact.peak

    def steady_residue(self) -> int:
        """The same between steps."""
        return self.steady + sum(term.nbytes for term in self.steady_terms) - self.fact.steady


def trace(loop: Loop) -> Traced:
    """The loop's step at B=4, S=4096, B symbolic."""

    def progress(text: str) -> None:
        print(f"  {loop.method}, {loop.name}: {text}", file=sys.stderr)

    if loop.fp32_outputs:
        from benchmarks.mistral.trainer import trainer_mistral

        return memir.trace(trainer_mistral(PRESET), loop.recipe, batch=4, seq=SEQ, progress=progress)
    return memir.trace(PRESET, loop.recipe, batch=4, seq=SEQ, sets={} if loop.window else NO_WINDOW, progress=progress)


def predict(loop: Loop) -> Iterator[Row]:
    """A row for each fact of the loop's method, from one trace."""
    traced = trace(loop)
    program = traced.program
    line = timeline(program)
    for fact in FACTS:
        if fact.method != loop.method:
            continue
        env = {name: value for name, value in (("B", fact.batch), ("S", SEQ)) if name in program.dims}
        numbers = line.evaluate(env)
        index = START if numbers.start == numbers.peak else numbers.running.index(numbers.peak)
        step = line.steps[index]
        nbytes = {storage.name: storage.nbytes.evaluate(env) for storage in program.storages}
        steady = [storage.name for storage in program.storages if storage.live_in and storage.device == "gpu"]
        held = (cublas_workspaces(), attention_mask(fact.batch, SEQ))
        live = [nbytes[name] for name in alive_at(program, line, index)]
        yield Row(
            loop,
            fact,
            traced.num_parameters,
            rounded_peak(line, nbytes, steady, env, round_size),
            sum(round_size(nbytes[name]) for name in steady),
            f"{step.phase.name} {step.op.opcode} {step.op.source}".rstrip(),
            (*held, unsplit_blocks(live), *([no_mask(SEQ)] if loop.window else [])),
            (*held, unsplit_blocks(nbytes[name] for name in steady)),
        )


def judge(row: Row, tolerance: float) -> Iterator[str]:
    """What is wrong with a row: a traced peak off by more than `tolerance` (a fraction), or a known fact that is missed."""
    name = f"{row.loop.method}, {row.loop.name}, B={row.fact.batch}"
    error = abs(row.peak - row.fact.peak) / row.fact.peak
    if error > tolerance:
        yield f"{name}: the peak is off by {error:.3%}"
    if row.loop.method == "full" and (f"{row.bytes_a_parameter:.2f}" != "10.00" or not row.place.startswith("optimizer ")):
        yield f"{name}: {row.bytes_a_parameter:.2f} bytes a parameter in {row.place}, not 10.00 in the optimizer step"
